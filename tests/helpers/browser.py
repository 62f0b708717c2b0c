"""Pages in a browser."""

import json


def complaints(browser):
    """The messages of the page since it was opened."""
    return [entry["message"] for entry in browser.get_log("browser")]


def requests(browser):
    """The addresses asked for since the last call."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
