"""Where the papers contradict themselves, each other or physics, and what penstock takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Contradiction:
    """`says`: what stands at `where`; `but`: what it cannot be reconciled with, and what is taken instead."""

    paper: str
    where: str
    says: str
    but: str


CONTRADICTIONS = (
    Contradiction(
        "PIPO", "section 3.5, appendix B",
        "W_mha = p·d·(2d + d·h_kv/h + 1) in the text",
        "the appendix has 2d·h_kv/h: K and V both; the appendix is right",
    ),
    Contradiction(
        "PIPO", "section 3.5, appendix B.1",
        "with preloading, prefill's M_mha holds 2C/l and M_mlp C/l of KV in the text",
        "the appendix has C/l and none; the text is the safer bound",
    ),
    Contradiction(
        "PIPO", "appendix B.2",
        "in decode M_attn = p·b·h, and M_mlp's C/l is spelt out as 4·p·b·s·d·h_kv/h",
        "scores against s keys take p·b·h·s, as the formula without preloading has it; C/l is 2·p·b·s·d·h_kv/h",
    ),
    Contradiction(
        "PIPO", "section 3.1.1",
        "LLaMA3.1 has 62 (8B) and 162 (70B) layers, attention and FFN counted apart",
        "162 is 2·80 + 2; 8B has 32 blocks, so the same count gives 66",
    ),
    Contradiction(
        "PIPO", "Table 1",
        "OPT-30B in FP16 from disk: 1.113 and 1.214 tokens/s",
        "the very figures of LLaMA3.1-70B in INT4 from RAM, one row of the two is a slip",
    ),
    Contradiction(
        "PIPO", "Tables 1 and 2",
        "up to 7.718 tokens/s of a 70B model in INT4, 60% of it in RAM",
        "batch 1 is bounded by the link at 1.5; the batch (1 to 32 in section 4.1) is not stated",
    ),
    Contradiction(
        "PIPO", "Table 2",
        "OPT-30B in FP16, 45% of its weights on an RTX 4090",
        "that is 27 GB of 60, and the card has 25.8 (24 GiB); 37% fit beside KV in RAM and a prompt's activations",
    ),
    Contradiction(
        "PIPO", "Tables 3 and 5",
        "LLaMA3.1-8B from disk: 0.837 s a token, and 4.925 tokens/s",
        "Table 3 says batch 1 (1.19 tokens/s), so Table 5 is of a batch of about 4, which it does not say",
    ),
    Contradiction(
        "PIPO", "appendix C.8, Table 6",
        "PIPO takes 200 MB more of device memory and 2 GB less of the host's",
        "the table has 0.05 to 0.24 GB more and 0.08 to 2.93 GB less; 16.57 GB are in use on a machine with 16 GB",
    ),
    Contradiction(
        "FlexGen", "Tables 4 and 8",
        "OPT-175B: 0.69 tokens/s at batch 256 (0.83 in decode, Table 3)",
        "Table 8's totals, 2711 + 11315 s, give 0.58 at that batch (0.70 in decode): 0.59 is Table 4 without overlap",
    ),
    Contradiction(
        "FlexGen", "memory example",
        "OPT-175B takes 325 GB, its KV 1.2 TB",
        "349 and 1314 in units of 10^9: the paper's GB are GiB here (PowerInfer says 350 GB)",
    ),
    Contradiction(
        "FlexGen", "Figure 1",
        "69 times, and 100 times, the throughput on OPT-175B",
        "without compression and with it; both divide by a 0.01 of one digit",
    ),
    Contradiction(
        "ScheInfer", "abstract, sections V-D and VII",
        "decode is up to 1.80 times as fast",
        "section V-D has 1.87",
    ),
    Contradiction(
        "ScheInfer", "Table I, link",
        "38, 40 and 24 GB/s over PCIe 4.0 x16, 4.0 x16 and 3.0 x16",
        "these links carry 31.5, 31.5 and 15.75 GB/s; the machines here have 0.79 of that",
    ),
    Contradiction(
        "ScheInfer", "section V-E2",
        "the best r_CG of LLaMA-2-70B in decode is 0.18 at 16 threads",
        "Table I gives 0.29 = 5.4 / (13 + 5.4); with 24.9 GB/s over the link it is 0.21, with 4.5 bits a weight 0.19",
    ),
    Contradiction(
        "ScheInfer", "Eq. 3 and 4, Table I",
        "one β a multiply-add, whatever the number of tokens",
        "on bed A 3.2e-12 s is 0.6 TFLOP/s of 155: the time to read a weight, so it holds for one row, not for prompts",
    ),
    Contradiction(
        "ScheInfer", "Eq. 15",
        "in a prompt n_W bytes cross the link, whatever r_GG",
        "what is at home on the device need not cross: (r_CG + r_CC)·n_W here",
    ),
    Contradiction(
        "ScheInfer", "section V-E4",
        "token assignment makes prefill up to 45.6 times as fast",
        "only beside a CPU that takes as long for each token as for one alone: Table I's β for all gives 11 to 62 times"
        " here, a CPU that reads a weight once a chunk at most 4",
    ),
    Contradiction(
        "ScheInfer", "section I",
        "Mixtral-8x22B in 4 bits takes about 110 GB",
        "141e9 weights are 70 GB at 4.0 bits, 79 at 4.5",
    ),
    Contradiction(
        "ScheInfer", "section V-C",
        "Qwen2-14B",
        "Qwen2 has no dense 14B; Mixtral-7B and Mixtral-22B stand for 8x7B and 8x22B",
    ),
    Contradiction(
        "ScheInfer", "section III-B",
        "Y2 of CG' = X2 × W2 of CG' below Eq. 2",
        "Eq. 2 multiplies Z2, the first product's result, as it must",
    ),
    Contradiction(
        "PowerInfer", "section 8.1",
        "64 GB/s of PCIe 4.0, 32 GB/s of PCIe 3.0",
        "both directions together; one carries 31.5 and 15.75",
    ),
    Contradiction(
        "PowerInfer", "Table 4",
        "14.38 to 321.63 ms end to end",
        "for 256 tokens these are seconds",
    ),
    Contradiction(
        "PowerInfer", "Table 4, LLaMA(ReGLU)-70B",
        "FP16, 92.76 s with llama.cpp, where the 40B model takes 321.63",
        "114 GB in RAM at 67.2 GB/s are 1.7 s a token, 430 s: the row fits a 4-bit model",
    ),
    Contradiction(
        "PowerInfer", "sections 1 and 8.2",
        "up to 8.00 times llama.cpp in INT4 on a PC with an RTX 4090",
        "section 8.2 has 4.28 there, and 8.00 on PC-Low",
    ),
    Contradiction(
        "PowerInfer", "section 2.2, Table 8",
        "llama.cpp takes around 600 ms a token of OPT-30B",
        "Table 8 has 1.1 tokens/s, 909 ms: the 10.9 times there would be 7.2",
    ),
    Contradiction(
        "PowerInfer", "sections 5.1 and 8.3.4",
        "predictors have 6% of the model's weights",
        "7.09% in section 8.3.4, the mean of Table 6",
    ),
    Contradiction(
        "PowerInfer", "Tables 1 and 3, section 8.2",
        "OPT-30B's FFNs are 97% inactive",
        "section 8.2 has around 20% of its neurons active a token, the footnote of section 3.2 about 10%",
    ),
    Contradiction(
        "PowerInfer", "Table 3, section 8.3.2",
        "Bamboo-7B's FFNs are 90% inactive",
        "section 8.3.2 has 80% to 86%, by the token",
    ),
    Contradiction(
        "PowerInfer", "sections 3.1 and 3.2",
        "in the footnote on OPT-30B 43% of the neurons make 80% of the activations",
        "section 3.1 has 26% for OPT-30B; 43% is LLaMA2(ReGLU)-70B",
    ),
    Contradiction(
        "PowerInfer", "Table 7",
        "LLaMA(ReGLU)-70B has 62.30% on both MMLU and GSM8K, and 61.90% on both with PowerInfer",
        "one column repeats the other; the means were made from it",
    ),
)  # fmt: skip
