"The kit on Kaggle: runs of its notebooks (`session`, whose names stand here, too), wheels, and notebooks to push."
from b2t_kaggle.kaggle.session import *  # noqa: F403
