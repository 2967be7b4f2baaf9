def published(path):
    return ""
