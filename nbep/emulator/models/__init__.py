"""When a store is seen, and which accesses nothing orders: `delayed`, `checked`."""
