"""Custom CUDA kernels for inference engines: plug-ins, captured graphs, a budget for every byte.

The public names are listed in __init__.pyi, and each is imported when it is first asked for: a
program pays for what it uses. Importing makes no file, reads no variable and loads no driver.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
