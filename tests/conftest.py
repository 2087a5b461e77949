"""Before any test imports torch."""

from hypothesis import HealthCheck, settings

from pvg.spinning import bound_spinning

bound_spinning()
# `make fuzz`: far more examples where a test does not say how many, from a new seed each time.
settings.register_profile(
    "fuzz", max_examples=3000, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
