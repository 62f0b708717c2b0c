"""Pages in a browser."""

import json


def complaints(browser):
    """The messages of the page since it was opened."""
    return [entry["message"] for entry in browser.get_log("browser")]


def draw_all(browser):
    """Draw every curve of the page, as printing does; else those near the window are drawn."""
    browser.execute_script("window.dispatchEvent(new Event('beforeprint'))")


def requests(browser):
    """The addresses asked for since the last call."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]


def contrast(one, other):
    """WCAG's contrast ratio of two opaque CSS colours."""
    dark, light = sorted(map(luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def luminance(colour):
    """WCAG's relative luminance."""
    parts = [x / 255 for x in channels(colour)[:3]]
    linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def over(colour, ground):
    """What a CSS colour looks like on an opaque one."""
    *above, opacity = (*channels(colour), 1.0)[:4]
    mixed = (opacity * x + (1 - opacity) * y for x, y in zip(above, channels(ground)[:3], strict=True))
    return f"rgb({', '.join(map(str, mixed))})"


def channels(colour):
    """The numbers of a CSS colour: red, green, blue and, for rgba, opacity."""
    return [float(x) for x in colour[colour.index("(") + 1 : -1].split(",")]
