"""Reports on one or several runs: measurements and conclusions, as a page, Markdown, or files for papers.

A report is created from run directories, on any machine. The package neither communicates nor trains.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
