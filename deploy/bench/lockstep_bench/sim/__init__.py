"""`lockstep sim`: the real step loop against simulated workers on a simulated clock.

    traces.py      what is asked: a file, or drawn requests
    shape.py       a model's bytes and operations, from its config.json
    costs.py       what a step costs: shape x rates x layout, the slowest rank decides
    workers.py     the workers of a group: rows, steps, outcomes, without a model
    simulation.py  clock, events, the step loop; what was seen
    figures.py     what was seen, as one row of figures

and the commands `run`, `fit`, `scale`, `published`, a module each.
"""
