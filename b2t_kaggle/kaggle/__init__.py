"What a session on Kaggle needs (`session`); a session's notebook imports it from here."
from b2t_kaggle.kaggle.session import *  # noqa: F403
