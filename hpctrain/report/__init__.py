"""The report of one or several runs: what they measured and what it means, as a page, Markdown, or files for papers.

Nothing here communicates or trains: a report is made from run directories, on any machine.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
