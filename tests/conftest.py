"""Settings for all tests. Helpers that tests import are in tests/support."""

from hypothesis import HealthCheck, settings

# Runs are deterministic: the same commit gives the same result, also where the database of examples is not kept.
settings.register_profile("nbep", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("nbep")
