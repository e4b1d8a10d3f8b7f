"""Model types that can be planned and do not run yet: one file per Hugging Face `model_type`, named as the type.

A file holds one function and a constant:

    spec(config)  the content of `config.json` as a ModelSpec with `cannot_run` set; raises what `hf.config` raises
    CANNOT_RUN    what this version lacks to run such a model, in a few words

Bytes and flops of the spec are those of the model. A detail of the mathematics that has neither may be missing; the
file's docstring names it. When a type comes to run, its file moves to the folder above.
"""
