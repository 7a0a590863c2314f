"`python -m b2t_kaggle.cli` is the command `b2t`."
from b2t_kaggle.cli import main
from b2t_kaggle.core.messages import command_name

if __name__ == '__main__': main(prog_name=command_name().lstrip('!'))
