"""How a fault of each language is put into a copy of the product, built and tested.

Each module has judge(fault, scratch, limit_s) -> Verdict. `scratch` is a folder of this process
alone that stays between the faults of a run: a back end keeps its copy or its build there. A fault
whose new text is the old one is the control, whose tests must pass.
"""
