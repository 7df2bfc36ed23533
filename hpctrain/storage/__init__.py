"""What datasets, checkpoints and records share, independent of any format.

Complete reads and writes, files replaced as a whole, the content hash, types of filesystems, even splits, and the
lease on a directory. It depends on no other package, and nothing here communicates.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
