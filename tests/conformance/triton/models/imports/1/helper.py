def doubled(x):
    return x * 2
