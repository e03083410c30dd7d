"""The gradient check: is a backward the derivative of its forward?"""
