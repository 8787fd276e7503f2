"""Run a program that imports deep_ep, with nbep in its place: python run.py program.py [arguments]"""

import runpy
import sys
from pathlib import Path

import nbep.deep_ep

nbep.deep_ep.install()
del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
runpy.run_path(sys.argv[0], run_name="__main__")
