"""PIPO's tables (Liu, Li and Li, "PIPO: Pipelined Offloading for Efficient Inference on Consumer Devices") for this
machine, where the processor computes and the disk streams. `python -m bench.pipo`."""
