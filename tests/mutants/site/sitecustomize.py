"""Every Python process that finds this folder first on its path imports this at its start."""

import importlib.machinery
import importlib.util
import os
import sys

import mutant_hook

mutant_hook.install_from_environment()

# Another sitecustomize, of the machine or of the user, must not be hidden by this one.
_here = os.path.dirname(os.path.abspath(__file__))
_others = [path for path in sys.path if os.path.abspath(path or ".") != _here]
_next = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
if _next is not None and _next.loader is not None:
    _module = importlib.util.module_from_spec(_next)
    _next.loader.exec_module(_module)
