"""Genres with their specific aspects, and characters and situations of plots."""

from dataclasses import dataclass

from demo.aspects import Aspect, aspect
from demo.notation import lines


@dataclass(frozen=True)
class Genre:
    """A genre: the aspects that only it has, and remarks on how well a film serves the genre.

    In a remark the slot {it} stands for the film, so that "it" does not refer to the aspect mentioned before.
    """

    name: str
    plural: str
    good: tuple[str, ...]
    bad: tuple[str, ...]
    aspects: tuple[Aspect, ...] = ()


_JOKES = aspect(
    "jokes",
    "plural",
    good="hilarious clever fresh sharp",
    bad="stale crude lame unfunny tired",
    good_why="""
        I was still laughing at one when the next one came
        they came [quickly|fast] and nearly all of them landed
        """,
    bad_why="""
        I had heard [most|all] of them before
        each one was explained [until it died|twice]
        """,
)
_SCARES = aspect(
    "scares",
    "plural",
    good="clever chilling inventive effective",
    bad="cheap lame predictable tired",
    good_why="""
        I [screamed|jumped] [twice|more than once]
        I had to watch [some|half] of them through my fingers
        """,
    bad_why="""
        I saw every one of them coming
        they were all [noise|shouting] and no [fear|dread]
        """,
)
_VILLAIN = aspect(
    "villain",
    "count",
    good="chilling terrifying charismatic unforgettable",
    bad="laughable cartoonish toothless boring",
    good_why="""
        he was [frightening|dangerous] without ever raising his voice
        every scene with him was electric
        """,
    bad_why="""
        he might as well have [twirled a mustache|worn a sign]
        he talked and talked but never [did a thing|frightened anyone]
        """,
)
_TWIST = aspect(
    "twist",
    "count",
    good="brilliant shocking clever elegant",
    bad="obvious silly absurd cheap",
    good_why="""
        it changed the meaning of everything before it
        the clues had been there all along
        """,
    bad_why="""
        I guessed it in the first ten minutes
        it made nonsense of everything before it
        """,
)
_SONGS = aspect(
    "songs",
    "plural",
    good="catchy joyful lovely memorable",
    bad="forgettable tuneless endless bland",
    good_why="""
        I have been singing them [all week|ever since]
        each one [moved|pushed] the story forward
        """,
    bad_why="""
        I could not remember one of them an hour later
        each one [stopped the story dead|sounded like the last]
        """,
)
_BATTLES = aspect(
    "battle scenes",
    "plural",
    good="thrilling harrowing gripping spectacular",
    bad="confusing endless bloodless noisy",
    good_why="""
        I could [almost smell the smoke|feel every blow]
        they never forgot the [people|fear] behind the guns
        """,
    bad_why="""
        I never knew who was fighting whom
        they went on until I no longer cared who won
        """,
)
_LOVE_STORY = aspect(
    "love story",
    "count",
    good="tender believable touching sweet",
    bad="unbelievable soppy cold lifeless",
    good_why="""
        I [wanted|longed] for the two of them to be happy
        every [glance|touch|silence] between the two of them meant something
        """,
    bad_why="""
        the two of them had no spark at all
        the two of them hardly seemed to like each other
        """,
)

GENRES = (
    Genre(
        "comedy",
        "comedies",
        lines("""
            I laughed [out loud|until I cried] [more than once|several times]
            {it} made the whole [row|theater] laugh
            I have not laughed so much in [a long time|years|months]
            """),
        lines("""
            I did not laugh [once|a single time]
            {it} was [never|hardly ever] funny
            I have laughed more at [the dentist|a bus stop|the evening news]
            """),
        (_JOKES,),
    ),
    Genre(
        "drama",
        "dramas",
        lines("""
            {it} earned every one of its tears
            {it} was sad and hopeful [at once|at the same time]
            {it} made me think about my own [family|mother|father|life]
            """),
        lines("""
            {it} begged for tears and earned [none|not one]
            {it} mistook [silence|gloom|shouting] for depth
            {it} had very little [feeling|heart|conflict]
            """),
    ),
    Genre(
        "thriller",
        "thrillers",
        lines("""
            {it} kept me guessing until the last [minute|scene]
            my heart was in my mouth for [an hour|two hours]
            I held my breath [more than once|for most of the last act]
            """),
        lines("""
            {it} had no [tension|suspense|danger] [at all|to speak of]
            I guessed the ending in [ten|five] minutes
            I was never [afraid|worried] for anyone in it
            """),
        (_VILLAIN, _TWIST),
    ),
    Genre(
        "horror film",
        "horror films",
        lines("""
            I slept with the lights on
            {it} got under my skin and stayed there
            I looked over my shoulder all the way home
            """),
        lines("""
            {it} was not scary [at all|for a second]
            I yawned more often than I jumped
            {it} had very little [fear|dread|menace]
            """),
        (_SCARES,),
    ),
    Genre(
        "romance",
        "romances",
        lines("""
            {it} made me believe in love [again|for two hours]
            {it} was [tender|sweet] without being sugary
            I wanted to call [my wife|my husband|an old love] afterwards
            """),
        lines("""
            {it} was as romantic as a [tax form|bus station|parking lot]
            I never believed that the couple [was in love|would last a week]
            {it} had very little [warmth|love|longing]
            """),
        (_LOVE_STORY,),
    ),
    Genre(
        "western",
        "westerns",
        lines("""
            {it} made an old legend feel new
            you could almost taste the dust
            {it} gave the old west a [human face|beating heart]
            """),
        lines("""
            {it} rode the same tired trail as a hundred others
            {it} had very little [dust|danger|open sky]
            even the horses looked [bored|tired|ready to leave]
            """),
        (_VILLAIN,),
    ),
    Genre(
        "war film",
        "war films",
        lines("""
            {it} showed the cost of war without [preaching|making a speech]
            {it} never lost sight of the [men|people] behind the guns
            {it} made me [think|ask] about what courage really is
            """),
        lines("""
            {it} made war look like a [game|parade|commercial]
            {it} had plenty of noise and nothing to say about war
            {it} had very little [courage|truth|danger]
            """),
        (_BATTLES,),
    ),
    Genre(
        "mystery",
        "mysteries",
        lines("""
            I was wrong about the [killer|culprit] [twice|three times]
            every clue was in plain sight and I missed them all
            I wanted to start again from the beginning when I knew the answer
            """),
        lines("""
            the answer was obvious from the [start|first scene]
            {it} had very little [mystery|logic|suspense]
            by the time they named the [killer|culprit] I no longer cared
            """),
        (_TWIST,),
    ),
    Genre(
        "musical",
        "musicals",
        lines("""
            I left the theater [singing|dancing]
            my feet were tapping all the way through
            every number was [better|bigger|brighter] than the one before
            """),
        lines("""
            nobody in it could [sing|dance]
            I [dreaded|sighed at] each new number
            {it} had very little [rhythm|joy|music]
            """),
        (_SONGS,),
    ),
    Genre(
        "family film",
        "family films",
        lines("""
            my children loved it and so did I
            {it} never talked down to [children|the kids]
            there was something in it for [every age|young and old]
            """),
        lines("""
            even my children [were bored|wanted to go home]
            {it} talked down to [children|the kids] [all the time|from the first scene]
            {it} had very little [magic|warmth|fun]
            """),
        (_JOKES, _SONGS),
    ),
)

# Leads of the plots, with the pronoun that later sentences use.
LEADS = (
    *(
        (name, "he")
        for name in lines("""
        a retired detective
        a lonely fisherman
        a young soldier
        a stubborn farmer
        a failed writer
        a night watchman
        a boy from the suburbs
        """)
    ),
    *(
        (name, "she")
        for name in lines("""
        a shy piano teacher
        a young nurse
        a famous singer
        a small-town lawyer
        an old widow
        a taxi driver with a secret
        a girl from the mountains
        """)
    ),
    *(
        (name, "they")
        for name in lines("""
        two brothers
        three old friends
        a pair of bank robbers
        two rival cooks
        four students
        """)
    ),
)

SITUATIONS = lines("""
    return{s} to {his} home town after [the war|many years|a long illness]
    lose{s} everything in [a fire|a flood|one night]
    inherit{s} [an old hotel|a farm|a house by the sea]
    fall{s} in love with [a stranger|an old enemy|the wrong person]
    find{s} [a bag of money|a lost child|an old letter]
    run{s} away from [home|the law|a past that will not let go]
    take{s} a job in [a lighthouse|a hospital|a strange city]
    want{s} one last chance to [put things right|win|say goodbye]
    discover{s} a secret about {his} [family|father|neighbors]
    set{s} out across the country to find {his} [mother|home|old teacher]
    learn{s} to [trust|forgive|live] again after [a divorce|an accident|a betrayal]
    decide{s} to [rob a bank|save the family farm|rebuild an old theater]
    wait{s} for [a letter|a train|an apology] that never comes
    """)

THEMES = lines("""
    family
    grief
    growing up
    friendship
    loneliness
    getting old
    first love
    forgiveness
    the price of success
    life in a small town
    courage
    jealousy
    """)
