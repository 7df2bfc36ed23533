"""What datasets, checkpoints and records share, independent of any format.

Complete reads and writes, files replaced as a whole, the content hash, types of filesystems, even splits, and the
lease on a directory. This package depends on no other package of hpctrain, and nothing in it communicates.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
