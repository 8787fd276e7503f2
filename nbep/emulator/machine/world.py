"""What is said between threads, launches and streams and the world that they are in, which is above them."""

NEVER = 1 << 62  # a deadline that does not come
SKIPPED = object()  # returned by an operation that had happened before its turn came
