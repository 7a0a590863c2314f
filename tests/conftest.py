"For all tests."
from hypothesis import settings

# A busy machine is no failure
settings.register_profile('kit', deadline=None)
settings.load_profile('kit')
