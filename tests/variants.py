"""Classes that differ from another one in a method or two, made where a test needs them."""


def variant(cls, name="Variant", /, **members):
    """Return a subclass with other members, as a user would write it inside a function."""
    assert all(hasattr(cls, member) or member[:2] == "__" for member in members), members
    place = {"__module__": cls.__module__, "__qualname__": f"variant.<locals>.{name}"}
    return type(name, (cls,), place | members)


def _wrapped(cls, name, functions, call):
    """Return a subclass whose methods are `call(function, inherited method, self, *arguments)`."""

    def method_of(key, function):
        def method(self, *args, **kwargs):
            return call(function, getattr(super(subclass, self), key), self, *args, **kwargs)

        return method

    methods = {key: method_of(key, function) for key, function in functions.items()}
    subclass = variant(cls, name, **methods)
    return subclass


def before(cls, name="Watched", /, **functions):
    """Return a subclass whose methods first call a function of the object and their arguments."""

    def call(function, method, self, *args, **kwargs):
        function(self, *args, **kwargs)
        return method(*args, **kwargs)

    return _wrapped(cls, name, functions, call)


def passing(cls, name="Passing", /, **functions):
    """Return a subclass whose methods get other arguments: the tuple that a function of the object and theirs returns."""

    def call(function, method, self, *args, **kwargs):
        return method(*function(self, *args, **kwargs))

    return _wrapped(cls, name, functions, call)


def after(cls, name="Watched", /, **functions):
    """Return a subclass whose methods then call a function of the object, their result and their arguments.

    What the function returns, unless that is None, is the result instead.
    """

    def call(function, method, self, *args, **kwargs):
        result = method(*args, **kwargs)
        changed = function(self, result, *args, **kwargs)
        return result if changed is None else changed

    return _wrapped(cls, name, functions, call)


def concrete(cls):
    """Return a subclass of a class whose constructor alone is abstract."""
    return variant(cls, __init__=lambda self, *args, **kwargs: cls.__init__(self, *args, **kwargs))
