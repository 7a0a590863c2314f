"`python -m b2t_kaggle.cli` is the command `b2t`."
from b2t_kaggle.cli import main

if __name__ == '__main__': main()
