"""What any backend, codec, bucket reducer, updater and checkpoint engine must do, as test classes to inherit.

    from hpctrain.testing import CodecContract

    class TestMyCodec(CodecContract):
        codec = MyCodec()

pytest collects the inherited tests. Needs pytest.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
