"""What any backend, codec, bucket reducer, updater and checkpoint engine must do, as test classes to inherit.

    from hpctrain.testing import CodecContract

    class TestMyCodec(CodecContract):
        codec = MyCodec()

pytest collects the inherited tests. Needs pytest.
"""

from hpctrain.public_names import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    __file__,
    old_names={"UpdaterContract": "hpctrain.testing.DistributedOptimizerContract"},
)
