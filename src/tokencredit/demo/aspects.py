"""What a review can talk about: the parts of a film, the kinds of film and the people they are about.

Phrases use a small notation, which `grammar.fill` expands: `[x|y]` is a choice, `{name}` a slot and `a~` becomes "a" or "an".
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Aspect:
    """A part of a film: words for it when it is good or bad, and clauses that give the reason."""

    name: str
    good: tuple[str, ...]
    bad: tuple[str, ...]
    good_why: tuple[str, ...]
    bad_why: tuple[str, ...]
    noun: str = "mass"  # mass: "sharp editing"; count: "a sharp script"; plural: "sharp jokes"
    pronoun: str = "it"


@dataclass(frozen=True)
class Genre:
    """A kind of film: the parts that only it has, and remarks on how well it did what its kind is for."""

    name: str
    plural: str
    good: tuple[str, ...]
    bad: tuple[str, ...]
    aspects: tuple[Aspect, ...] = ()


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ASPECTS = (
    Aspect(
        "acting",
        _words("superb natural heartfelt subtle wonderful understated convincing first-rate"),
        _words("wooden stiff flat unconvincing forced lifeless amateurish uneven"),
        (
            "[everyone|every actor] on screen seemed to [believe|mean] every word",
            "I forgot that I was watching [actors|stars|famous faces] at all",
            "even the smallest parts were played with [care|feeling|real skill]",
            "a single look often said more than a [long speech|page of words]",
        ),
        (
            "nobody on screen seemed [awake|to mean a word|to want to be there]",
            "the [leads|stars] looked [bored|lost|tired] in [every scene|almost every shot]",
            "most lines were [shouted|mumbled|read] as if [from a card|for the first time|to an empty room]",
        ),
    ),
    Aspect(
        "script",
        _words("smart sharp tight witty layered thoughtful clever elegant"),
        _words("lazy clumsy thin muddled predictable careless tired shallow"),
        (
            "each scene [built on|grew out of|answered] the one before",
            "it trusted [the audience|us|its viewers] to keep up",
            "the small details [came back|paid off|mattered] in the end",
            "[not a word|not a scene|nothing] was wasted",
        ),
        (
            "nothing anyone did made [sense|any sense at all]",
            "it picked up one idea after another and [finished none of them|dropped them all]",
            "I could [guess|see] every turn [ten minutes early|long before it came]",
            "it explained [everything twice|every feeling out loud]",
        ),
        "count",
    ),
    Aspect(
        "pacing",
        _words("brisk steady patient confident lively relaxed"),
        _words("slow sluggish uneven jerky plodding awkward"),
        (
            "two hours [went|flew] by like [ten minutes|one]",
            "no scene [outstayed its welcome|ran a minute too long]",
            "it knew when to [rush|hurry] and when to [wait|breathe|slow down]",
        ),
        (
            "the [first|second|last] hour [dragged|crawled] [badly|without mercy]",
            "I looked at my watch [twice|three times|again and again]",
            "every scene went on [far|much] too long",
        ),
    ),
    Aspect(
        "score",
        _words("haunting lovely stirring delicate memorable gorgeous"),
        _words("loud intrusive generic syrupy grating repetitive"),
        (
            "it [lifted|carried|deepened] [every|each] [big scene|quiet moment]",
            "I [hummed|was humming] the main theme all the way home",
            "it knew when to [fall silent|stay quiet|step back]",
        ),
        (
            "it told us what to feel [in every scene|from the first note to the last]",
            "it [drowned out|buried] half of the lines",
            "the same [four notes|tune|sad piano] came back again and again",
        ),
        "count",
    ),
    Aspect(
        "camera work",
        _words("stunning graceful inventive fluid beautiful breathtaking"),
        _words("shaky murky ugly dizzying flat careless"),
        (
            "every frame looked like a [painting|photograph]",
            "[light|color|shadow] was used with [great|real] [care|imagination|feeling]",
            "the [city|sea|desert|countryside] has [rarely|never] looked better",
        ),
        (
            "I could [hardly|barely] tell what was going on",
            "it gave me a headache [within minutes|long before the end]",
            "half of the picture was [too dark to see|out of focus]",
        ),
    ),
    Aspect(
        "ending",
        _words("perfect moving satisfying brave surprising bittersweet"),
        _words("rushed silly abrupt predictable hollow absurd"),
        (
            "it [tied|brought] every thread together [with care|without cheating]",
            "I did not see it coming [at all|for a moment]",
            "there was not a dry eye in the [house|theater|room]",
            "I [sat|stayed] in my seat until the lights came on",
        ),
        (
            "it came out of nowhere",
            "[nothing|not a single question] was [explained|resolved|settled]",
            "the writers [clearly|simply] ran out of ideas",
            "I laughed out loud for all the wrong reasons",
        ),
        "count",
    ),
    Aspect(
        "dialogue",
        _words("crisp natural sparkling funny honest quotable"),
        _words("stilted corny awkward dreadful repetitive clumsy"),
        (
            "people [spoke|talked] the way people really do",
            "I wanted to write down [half of the lines|every other line]",
            "every line told us something new",
        ),
        (
            "nobody [talks|speaks] like that",
            "people kept [explaining|repeating] what [everyone|we all] already knew",
            "every [other|second] line was a [slogan|speech|worn-out phrase]",
        ),
    ),
    Aspect(
        "direction",
        _words("assured sensitive bold imaginative confident careful"),
        _words("heavy-handed clumsy uninspired lifeless confused timid"),
        (
            "[every|each] choice felt right",
            "it got the best out of [everyone|a young cast|a small budget]",
            "it never [pushed too hard|lost sight of the people|showed off]",
        ),
        (
            "every [choice|shot|scene] felt borrowed from [something|somewhere] better",
            "it never found the right tone",
            "the [quiet|big|tender] moments were [thrown away|lost in the noise]",
        ),
    ),
    Aspect(
        "humor",
        _words("dry gentle clever warm sly sharp"),
        _words("crude forced tired mean stale childish"),
        (
            "I [laughed|smiled] from [start to finish|the first scene to the last]",
            "it grew out of the people and not out of [insults|accidents|shouting]",
            "it never [hurt|got in the way of] the serious moments",
        ),
        (
            "[not one|hardly a single|barely one] joke landed",
            "the same gag came back [five|six|ten] times",
            "nobody in the [theater|room|whole row] laughed",
        ),
    ),
    Aspect(
        "story",
        _words("touching gripping original rich absorbing timely"),
        _words("thin confusing predictable silly pointless muddled"),
        (
            "I [had|needed|wanted] to know what would happen next",
            "it [surprised me more than once|took turns I did not expect]",
            "it had [something|plenty] to say about [family|grief|growing up|friendship|courage]",
        ),
        (
            "I stopped [caring|following it|paying attention] [after twenty minutes|halfway through]",
            "there were holes big enough to drive a [truck|bus|train] through",
            "nothing [much|at all] happened for [an hour|the first hour]",
        ),
        "count",
    ),
    Aspect(
        "characters",
        _words("vivid believable lovable complex memorable likable"),
        _words("flat unlikable shallow interchangeable thin annoying"),
        (
            "I cared about [every one|all] of them",
            "they felt like people I [know|have met|grew up with]",
            "I [missed|was missing] them as soon as it was over",
        ),
        (
            "I did not care what happened to any of them",
            "they made one stupid [choice|mistake|decision] after another",
            "not one of them [changed|grew|learned a thing]",
        ),
        "plural",
        "they",
    ),
    Aspect(
        "special effects",
        _words("dazzling seamless spectacular striking convincing"),
        _words("cheap fake dated cheesy distracting"),
        (
            "they [served|helped] the story instead of [replacing|burying] it",
            "I never once [saw|noticed] the seams",
            "they made the impossible look [real|easy]",
        ),
        (
            "they looked like something from [an old video game|a school project]",
            "I could almost see the [wires|strings]",
            "they pulled me out of [every scene|the story]",
        ),
        "plural",
        "they",
    ),
    Aspect(
        "editing",
        _words("precise crisp rhythmic elegant sharp"),
        _words("choppy frantic sloppy confusing clumsy"),
        (
            "every cut came at the right moment",
            "it kept [two|three] stories [clear|moving] at once",
        ),
        (
            "no shot lasted longer than [two|three] seconds",
            "scenes [stopped|began|ended] in the wrong place",
            "I lost track of who was where",
        ),
    ),
    Aspect(
        "opening",
        _words("gripping tense striking funny unforgettable"),
        _words("slow confusing clumsy endless dreary"),
        (
            "it [pulled|drew] me in [at once|within minutes]",
            "I knew right away that I was in good hands",
        ),
        (
            "it took [half an hour|forty minutes] for anything to happen",
            "I almost [left|walked out|fell asleep] after ten minutes",
        ),
        "count",
    ),
    Aspect(
        "cast",
        _words("strong charming likable talented perfect wonderful"),
        _words("weak miscast wasted bored dull"),
        (
            "they [played off|listened to] each other [beautifully|with ease]",
            "[nobody|no one] struck a false note",
        ),
        (
            "[nobody|hardly anyone] suited the part",
            "they had no [spark|warmth|chemistry] [at all|together]",
        ),
        "count",
    ),
    Aspect(
        "sets",
        _words("lavish detailed gorgeous inventive"),
        _words("cheap bare ugly fake"),
        (
            "I wanted to [live in|walk around in] them",
            "every [room|street|corner] told a story of its own",
        ),
        (
            "they looked like [cardboard|leftovers from something older]",
            "I could see where the paint ended",
        ),
        "plural",
        "they",
    ),
    Aspect(
        "lead actress",
        _words("brilliant magnetic radiant fearless marvelous"),
        _words("dull miscast stiff unconvincing bland"),
        (
            "she [carried|lit up] every scene",
            "she could break your heart with one [look|word|smile]",
            "I could not take my eyes off her",
        ),
        (
            "she never [found|believed in] the part",
            "she had [one face|one expression|two expressions] for everything",
            "she seemed to be [thinking about lunch|waiting for a bus|in another room]",
        ),
        "count",
        "she",
    ),
    Aspect(
        "lead actor",
        _words("terrific commanding charming wonderful fearless"),
        _words("wooden miscast smug unconvincing bland"),
        (
            "he [carried|lit up] every scene",
            "he made [courage|sorrow|anger|kindness] look easy",
            "he has never been better",
        ),
        (
            "he never [found|believed in] the part",
            "he [shouted|mumbled|sulked] his way through [every scene|the whole thing]",
            "he seemed to be [thinking about lunch|waiting for a bus|in another room]",
        ),
        "count",
        "he",
    ),
)

_JOKES = Aspect(
    "jokes",
    _words("hilarious clever fresh silly sharp"),
    _words("stale crude lame unfunny tired"),
    (
        "I was still laughing at [one|the first] when the next one came",
        "they came [quickly|fast] and nearly all of them landed",
    ),
    ("I had heard [most|all] of them before", "each one was explained [until it died|twice]"),
    "plural",
    "they",
)
_SCARES = Aspect(
    "scares",
    _words("clever chilling inventive effective"),
    _words("cheap lame predictable tired"),
    ("I [screamed|jumped] [twice|more than once]", "I had to watch [some|half] of them through my fingers"),
    ("I saw every one of them coming", "they were all [noise|shouting] and no [fear|dread]"),
    "plural",
    "they",
)
_VILLAIN = Aspect(
    "villain",
    _words("chilling terrifying charismatic unforgettable"),
    _words("laughable cartoonish toothless boring"),
    ("he was [frightening|dangerous] without ever raising his voice", "every scene with him was electric"),
    (
        "he might as well have [twirled a mustache|worn a sign]",
        "he [talked|talked and talked] but never [did a thing|frightened anyone]",
    ),
    "count",
    "he",
)
_TWIST = Aspect(
    "twist",
    _words("brilliant shocking clever elegant"),
    _words("obvious silly absurd cheap"),
    ("it changed the meaning of everything before it", "the clues had been there all along"),
    ("I guessed it in the first ten minutes", "it made nonsense of everything before it"),
    "count",
)
_SONGS = Aspect(
    "songs",
    _words("catchy joyful lovely memorable"),
    _words("forgettable tuneless endless bland"),
    ("I have been singing them [all week|ever since]", "each one [moved|pushed] the story forward"),
    ("I could not remember one of them an hour later", "each one [stopped the story dead|sounded like the last]"),
    "plural",
    "they",
)
_BATTLES = Aspect(
    "battle scenes",
    _words("thrilling harrowing gripping spectacular"),
    _words("confusing endless bloodless noisy"),
    ("I could [almost smell the smoke|feel every blow]", "they never forgot the [people|fear] behind the guns"),
    ("I never knew who was fighting whom", "they went on until I no longer cared who won"),
    "plural",
    "they",
)
_ROMANCE = Aspect(
    "love story",
    _words("tender believable touching sweet"),
    _words("unbelievable soppy cold lifeless"),
    (
        "I [wanted|longed] for the two of them to be happy",
        "every [glance|touch|silence] between the two of them meant something",
    ),
    ("the two of them had no spark at all", "the two of them hardly seemed to like each other"),
    "count",
)

GENRES = (
    Genre(
        "comedy",
        "comedies",
        ("I laughed [out loud|until I cried] [more than once|several times]", "it made the whole [row|theater] laugh"),
        ("I did not laugh [once|a single time]", "it was [never|hardly ever] funny"),
        (_JOKES,),
    ),
    Genre(
        "drama",
        "dramas",
        ("it earned every one of its tears", "it was sad and hopeful [at once|at the same time]"),
        ("it begged for tears and earned [none|not one]", "it mistook [silence|gloom|shouting] for depth"),
    ),
    Genre(
        "thriller",
        "thrillers",
        ("it kept me guessing until the last [minute|scene]", "my heart was in my mouth for [an hour|two hours]"),
        ("there was no [tension|suspense|danger] [at all|to speak of]", "I guessed the ending in [ten|five] minutes"),
        (_VILLAIN, _TWIST),
    ),
    Genre(
        "horror film",
        "horror films",
        ("I slept with the lights on", "it got under my skin and stayed there"),
        ("it was not scary [at all|for a second]", "I yawned more often than I jumped"),
        (_SCARES,),
    ),
    Genre(
        "romance",
        "romances",
        ("it made me believe in love [again|for two hours]", "it was [tender|sweet] without being sugary"),
        (
            "it was as romantic as [a tax form|a bus station]",
            "I never believed that the couple [was in love|would last a week]",
        ),
        (_ROMANCE,),
    ),
    Genre(
        "western",
        "westerns",
        ("it made an old legend feel new", "you can almost taste the dust"),
        ("it was all hats and no cattle", "it rode the same tired trail as a hundred others"),
        (_VILLAIN,),
    ),
    Genre(
        "war film",
        "war films",
        (
            "it showed the cost of war without [preaching|flags]",
            "it never lost sight of the [men|people] behind the guns",
        ),
        ("it made war look like a [game|parade|commercial]", "it had plenty of noise and nothing to say about war"),
        (_BATTLES,),
    ),
    Genre(
        "mystery",
        "mysteries",
        ("I was wrong about the [killer|culprit] [twice|three times]", "every clue was in plain sight"),
        ("the answer was obvious from the [start|first scene]", "the [answer|culprit] made no sense"),
        (_TWIST,),
    ),
    Genre(
        "musical",
        "musicals",
        ("I left the theater [singing|dancing]", "my feet were tapping all the way through"),
        ("nobody in it could [sing|dance]", "I [dreaded|sighed at] each new number"),
        (_SONGS,),
    ),
    Genre(
        "family film",
        "family films",
        ("my children loved it and so did I", "it never talked down to [children|the kids]"),
        (
            "even my children [were bored|wanted to go home]",
            "it talked down to [children|the kids] [all the time|from the first scene]",
        ),
        (_JOKES, _SONGS),
    ),
)

# Whom a film is about, with the pronoun that later sentences use.
LEADS = (
    ("a retired detective", "he"),
    ("a lonely fisherman", "he"),
    ("a young soldier", "he"),
    ("a stubborn farmer", "he"),
    ("a failed writer", "he"),
    ("a shy piano teacher", "she"),
    ("a young nurse", "she"),
    ("a famous singer", "she"),
    ("a small-town lawyer", "she"),
    ("an old widow", "she"),
    ("two brothers", "they"),
    ("three old friends", "they"),
    ("a pair of bank robbers", "they"),
    ("two rival cooks", "they"),
)

SITUATIONS = (
    "return{s} to {his} home town after [the war|many years|a long illness]",
    "lose{s} everything in [a fire|a flood|one night]",
    "inherit{s} [an old hotel|a farm|a house by the sea]",
    "fall{s} in love with [a stranger|an old enemy|the wrong person]",
    "find{s} [a bag of money|a lost child|an old letter]",
    "run{s} away from [home|the law|a past that will not let go]",
    "take{s} a job in [a lighthouse|a hospital|a strange city]",
    "want{s} one last chance to [put things right|win|say goodbye]",
    "discover{s} a secret about {his} [family|father|neighbors]",
    "set{s} out across the country to find {his} [mother|home|old teacher]",
)

THEMES = (
    "family",
    "grief",
    "growing up",
    "friendship",
    "loneliness",
    "getting old",
    "first love",
    "forgiveness",
    "the price of success",
    "life in a small town",
    "courage",
    "jealousy",
)
