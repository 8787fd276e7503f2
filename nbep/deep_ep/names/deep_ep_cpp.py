"""`import deep_ep_cpp` in a process that has this folder on its path: the import returns nbep.deep_ep.cpp."""

from nbep.deep_ep import install

install()
