"The kit on Kaggle: runs of its notebooks (`session`, whose names stand here, too), wheels, notebooks to push, whole cycles."
from b2t_kaggle.kaggle.session import *  # noqa: F403
