"`python -m b2t_kaggle.cli` is the command `b2t`."
from b2t_kaggle.cli.command import command_name, main

if __name__ == '__main__': main(prog_name=command_name())
