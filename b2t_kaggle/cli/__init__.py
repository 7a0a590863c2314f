"The command `b2t`."
from b2t_kaggle.cli.command import main  # noqa: F401
