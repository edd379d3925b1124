"""What every test gets: a Hypothesis profile whose examples do not depend on the day or on the machine's speed."""

from hypothesis import HealthCheck, settings

settings.register_profile("steady", derandomize=True, deadline=None, database=None, print_blob=True,
                          suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")
