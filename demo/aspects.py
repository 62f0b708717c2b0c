"""Aspects of a film that a review can judge, with positive and negative adjectives and reasons."""

from dataclasses import dataclass

from demo.notation import lines, words


@dataclass(frozen=True)
class Aspect:
    """An aspect of a film. Its adjectives must fit before the noun, after "was", and after "so" and "really"."""

    name: str
    noun: str  # mass: "sharp editing"; count: "a sharp script"; plural: "sharp jokes"
    good: tuple[str, ...]
    bad: tuple[str, ...]
    good_why: tuple[str, ...]
    bad_why: tuple[str, ...]


def aspect(name: str, noun: str, *, good: str, bad: str, good_why: str, bad_why: str) -> Aspect:
    """Make an aspect from whitespace-separated words and newline-separated reasons."""
    return Aspect(name, noun, words(good), words(bad), lines(good_why), lines(bad_why))


ASPECTS = (
    aspect(
        "acting",
        "mass",
        good="superb natural heartfelt subtle wonderful restrained convincing graceful",
        bad="wooden stiff flat unconvincing forced lifeless amateurish uneven",
        good_why="""
            [everyone|every actor] on screen seemed to [believe|mean] every word
            I forgot that I was watching [actors|stars|famous faces]
            even the smallest parts were played with [care|feeling|real skill]
            a single look often said more than a [long speech|page of words]
            """,
        bad_why="""
            nobody on screen seemed [awake|to mean a word|to want to be there]
            the [leads|stars] looked [bored|lost|tired] in [every scene|almost every shot]
            most lines were [shouted|mumbled|read] as if [from a card|for the first time|to an empty room]
            I never forgot that I was watching [actors|stars|famous faces]
            """,
    ),
    aspect(
        "script",
        "count",
        good="smart sharp tight witty layered thoughtful clever elegant",
        bad="lazy clumsy thin muddled predictable careless tired shallow",
        good_why="""
            each scene [built on|grew out of|answered] the one before
            it trusted [the audience|us|its viewers] to keep up
            the small details [came back|paid off|mattered] in the end
            [not a word|not a scene|nothing] was wasted
            """,
        bad_why="""
            nothing that anyone did made [sense|any sense at all]
            it picked up one idea after another and [finished none of them|dropped them all]
            I could [guess|see] every turn [ten minutes early|long before it came]
            it explained [everything twice|every feeling out loud]
            """,
    ),
    aspect(
        "pacing",
        "mass",
        good="brisk steady patient confident lively relaxed",
        bad="slow sluggish uneven jerky plodding awkward",
        good_why="""
            two hours [went|flew] by like [ten minutes|twenty minutes]
            no scene [outstayed its welcome|ran a minute too long]
            it knew when to [rush|hurry] and when to [wait|breathe|slow down]
            """,
        bad_why="""
            the [first|second|last] hour [dragged|crawled] [badly|without mercy]
            I looked at my watch [twice|three times|again and again]
            every scene went on [far|much] too long
            """,
    ),
    aspect(
        "score",
        "count",
        good="haunting lovely stirring delicate memorable gorgeous",
        bad="loud intrusive generic syrupy grating repetitive",
        good_why="""
            it [lifted|carried|deepened] [every|each] [big scene|quiet moment]
            I [hummed|was humming] the main theme all the way home
            it knew when to [fall silent|stay quiet|step back]
            """,
        bad_why="""
            it told us what to feel [in every scene|from the first note to the last]
            it [drowned out|buried] half of the lines
            the same [four notes|tune|sad piano] came back again and again
            """,
    ),
    aspect(
        "camera work",
        "mass",
        good="stunning graceful inventive fluid beautiful breathtaking",
        bad="shaky murky ugly dizzying flat careless",
        good_why="""
            every frame looked like a [painting|photograph]
            [light|color|shadow] was used with [great|real] [care|imagination|feeling]
            the [city|sea|desert|countryside] has [rarely|never] looked better
            """,
        bad_why="""
            I could [hardly|barely] tell what was going on
            it gave me a headache [within minutes|long before the end]
            half of the picture was [too dark to see|out of focus]
            """,
    ),
    aspect(
        "ending",
        "count",
        good="perfect moving satisfying brave surprising bittersweet",
        bad="rushed silly abrupt predictable hollow absurd",
        good_why="""
            it [tied|brought] every thread together [with care|without cheating]
            I did not see it coming [at all|for a moment]
            there was not a dry eye in the [house|theater|room]
            I [sat|stayed] in my seat until the lights came on
            """,
        bad_why="""
            it came out of nowhere
            [nothing|not a single question] was [explained|resolved|settled]
            it seemed that the writers had run out of [ideas|time|paper]
            it made me laugh for all the wrong reasons
            """,
    ),
    aspect(
        "dialogue",
        "mass",
        good="crisp natural sparkling funny honest quotable",
        bad="stilted corny awkward dreadful repetitive clumsy",
        good_why="""
            people [spoke|talked] the way people really do
            I wanted to write down [half of the lines|every other line]
            every line told us something new
            """,
        bad_why="""
            nobody [talks|speaks] like that
            people kept [explaining|repeating] what [everyone|we all] already knew
            every [other|second] line was a [slogan|speech|greeting card]
            """,
    ),
    aspect(
        "direction",
        "mass",
        good="assured sensitive bold imaginative confident careful",
        bad="heavy-handed clumsy uninspired lifeless confused timid",
        good_why="""
            [every|each] choice felt right
            it got the best out of [everyone|a young cast|a small budget]
            it never [pushed too hard|lost sight of the people|showed off]
            """,
        bad_why="""
            every [choice|shot|scene] felt borrowed from [something|somewhere] better
            it never found the right tone
            the [quiet|big|tender] moments were [thrown away|lost in the noise]
            """,
    ),
    aspect(
        "humor",
        "mass",
        good="dry gentle clever warm sly sharp",
        bad="crude forced tired mean stale childish",
        good_why="""
            I [laughed|smiled] from [start to finish|the first scene to the last]
            it grew out of the people and not out of [insults|accidents|shouting]
            it never [hurt|got in the way of] the serious moments
            """,
        bad_why="""
            [not one|hardly a single|barely one] joke landed
            the same gag came back [five|six|ten] times
            nobody in the [theater|room|whole row] laughed
            """,
    ),
    aspect(
        "story",
        "count",
        good="touching gripping original rich absorbing timely",
        bad="thin confusing predictable silly pointless muddled",
        good_why="""
            I [had|needed|wanted] to know what would happen next
            it [surprised me more than once|took turns I did not expect]
            it had [something|plenty] to say about [family|grief|growing up|friendship|courage]
            """,
        bad_why="""
            I stopped [caring|following it|paying attention] [after twenty minutes|halfway through]
            there were holes big enough to drive a [truck|bus|train] through
            nothing [much|at all] happened for [an hour|the first hour]
            """,
    ),
    aspect(
        "characters",
        "plural",
        good="vivid believable lovable complex memorable likable",
        bad="flat unlikable shallow interchangeable thin annoying",
        good_why="""
            I cared about [every one|all] of them
            they felt like people I [know|have met|grew up with]
            I [missed|was missing] them as soon as it was over
            """,
        bad_why="""
            I did not care what happened to any of them
            they made one stupid [choice|mistake|decision] after another
            not one of them [changed|grew|learned a thing]
            """,
    ),
    aspect(
        "special effects",
        "plural",
        good="dazzling seamless spectacular striking convincing",
        bad="cheap fake dated cheesy distracting",
        good_why="""
            they [served|helped] the story instead of [replacing|burying] it
            I never once [saw|noticed] the seams
            they made the impossible look [real|easy]
            """,
        bad_why="""
            they looked like something from [an old video game|a school project]
            I could almost see the [wires|strings]
            they pulled me out of [every scene|the story]
            """,
    ),
    aspect(
        "editing",
        "mass",
        good="precise crisp rhythmic elegant sharp",
        bad="choppy frantic sloppy confusing clumsy",
        good_why="""
            every cut came at the right moment
            it kept [two|three] stories [clear|moving] at once
            """,
        bad_why="""
            no shot lasted longer than [two|three] seconds
            scenes [stopped|began|ended] in the wrong place
            I lost track of who was where
            """,
    ),
    aspect(
        "opening",
        "count",
        good="gripping tense striking funny unforgettable",
        bad="slow confusing clumsy endless dreary",
        good_why="""
            it [pulled|drew] me in [at once|within minutes]
            I knew right away that I was in good hands
            """,
        bad_why="""
            it took [half an hour|forty minutes] for anything to happen
            I almost [left|walked out|fell asleep] after ten minutes
            """,
    ),
    aspect(
        "cast",
        "count",
        good="strong charming likable talented perfect wonderful",
        bad="weak miscast lifeless bored dull uneven",
        good_why="""
            they [played off|listened to] each other [beautifully|with ease]
            [nobody|no one] struck a false note
            """,
        bad_why="""
            [nobody|hardly anyone] suited the part
            they had no [spark|warmth|chemistry] [at all|together]
            """,
    ),
    aspect(
        "sets",
        "plural",
        good="lavish detailed gorgeous inventive",
        bad="cheap bare ugly fake",
        good_why="""
            I wanted to [live in|walk around in] them
            every [room|street|corner] told a story of its own
            """,
        bad_why="""
            they looked like [cardboard|leftovers from something older]
            I could see where the paint ended
            """,
    ),
    aspect(
        "lead actress",
        "count",
        good="brilliant magnetic radiant fearless marvelous",
        bad="dull miscast stiff unconvincing bland",
        good_why="""
            she [carried|lit up] every scene
            she could break your heart with one [look|word|smile]
            I could not take my eyes off her
            """,
        bad_why="""
            she never [found|believed in] the part
            she had [one face|one expression|two expressions] for everything
            she seemed to be [thinking about lunch|waiting for a bus|in another room]
            """,
    ),
    aspect(
        "lead actor",
        "count",
        good="terrific commanding charming wonderful fearless",
        bad="wooden miscast smug unconvincing bland",
        good_why="""
            he [carried|lit up] every scene
            he made [courage|sorrow|anger|kindness] look easy
            he has never been better
            """,
        bad_why="""
            he never [found|believed in] the part
            he [shouted|mumbled|sulked] his way through [every scene|the whole thing]
            he seemed to be [thinking about lunch|waiting for a bus|in another room]
            """,
    ),
)
