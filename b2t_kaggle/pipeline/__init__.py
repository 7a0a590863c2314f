"The stages of a run: their definitions, their execution, and their results."
