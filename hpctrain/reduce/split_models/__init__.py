"""The updater of a model of which each rank holds a part: by FSDP2, split layers, or a pipeline."""
