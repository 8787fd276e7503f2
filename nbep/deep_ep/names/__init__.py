"""A folder for the path: `import deep_ep` and `import deep_ep_cpp` find nbep's modules there. See installation.py."""
