"""What datasets, checkpoints and records share below any format: full reads and writes, hashes, filesystem types.

Knows no other package. Nothing here communicates.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
