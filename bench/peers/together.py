"""`python -m bench.peers.together MODEL`: penstock answering several sequences at once, without HTTP, as a worker of
`bench.serve`."""

from __future__ import annotations

from bench.peers import PROMPT_TOKENS, Answer, Loaded, limited_arguments, serve, token_ids
from penstock.runtime import host
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.sampling import SamplingParams
from penstock.spec.ask import Ask


def main() -> None:
    parser = limited_arguments(__doc__)
    parser.add_argument("--sequences", type=int, required=True)
    parser.add_argument("--output", type=int, required=True, help="tokens that the plan is made for")
    parser.add_argument(
        "--logprobs", action="store_true", help="of each token too, as the clients of `bench.serve` ask for them"
    )
    parser.add_argument("--kv", help="format of the KV")
    wanted = parser.parse_args()

    def load() -> Loaded:
        ask = Ask(
            batch=wanted.sequences, context=wanted.context, prompt_tokens=PROMPT_TOKENS, output_tokens=wanted.output,
            host_memory_bytes=wanted.limit, kv=wanted.kv,
        )  # fmt: skip
        engine = Engine.load(wanted.model, ask, Loading(cache=wanted.cache))

        def decode(tokens: int) -> Answer:
            """So many steps of all sequences after their prompts, which are not counted."""
            prompts = [
                token_ids(engine.packed.spec.vocab, PROMPT_TOKENS, seq).tolist() for seq in range(wanted.sequences)
            ]
            logprobs = 0 if wanted.logprobs else None
            params = SamplingParams(max_tokens=tokens + 1, ignore_eos=True, logprobs=logprobs)
            answers = engine.generate(prompts, params)
            return {"seconds": answers[0].decode_s, "peak_host_bytes": host.peak_rss_bytes()}

        return {"predicted_tokens_per_s": engine.prediction.decode_tokens_per_s}, {"decode": decode}

    serve(load)


if __name__ == "__main__":
    main()
