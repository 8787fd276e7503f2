"""`import deep_ep` in a process that has this folder on its path: the import returns nbep.deep_ep."""

from nbep.deep_ep import install

install()
