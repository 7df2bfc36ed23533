"""The updater of a model that is split over the ranks: by FSDP2, by tensor parallelism, or into pipeline stages."""
