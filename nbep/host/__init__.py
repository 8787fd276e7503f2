"""The host side: communicators, memory and its handles, the launcher, `Buffer` and one module per verb."""
