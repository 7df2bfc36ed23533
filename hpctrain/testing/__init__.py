"""Test classes that check an implementation of a backend, codec, bucket reducer, updater or checkpoint engine.

Write a test class that inherits from one of these classes, and set or implement what the docstring of that class
requires. pytest collects the inherited tests:

    from hpctrain.testing import CodecContract

    class TestMyCodec(CodecContract):
        codec = MyCodec()

Needs pytest.
"""

from hpctrain.public_names import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    __file__,
    old_names={"UpdaterContract": "hpctrain.testing.DistributedOptimizerContract"},
)
