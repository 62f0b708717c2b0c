"""How a review speaks of a film as a whole: openings, verdicts, concessions and closings, for praise and for blame.

The notation is that of `aspects`. Where a phrase is a pair, the key is the verdict: True is praise.
Slots: {film} the word for the film; {genre}, {genres}; {A}, {B} parts of the film that share the verdict and {O}, {P} parts
that go against it, each with {A_adj}, {A_was}, {A_it}, {A_some} ("a sharp script") and {A_bare} ("sharp script").
"""

FILM_WORDS = ("movie", "movie", "movie", "film", "film")

SUBJECTS = ("This movie",) * 6 + ("This film",) * 2 + ("The movie",) * 2 + ("The film", "This {genre}", "The {genre}")

ADVERBS = ("really ",) * 7 + ("truly ", "genuinely ", "simply ", "just ") + ("",) * 5

FILM_ADJECTIVES = {
    True: (
        "[moving|funny|gripping|clever|charming|beautiful|thrilling|warm|original|delightful|powerful|absorbing|witty]",
        "[wonderful|entertaining|good|great|excellent|impressive|satisfying|inventive|heartfelt|exciting|lovely|special]",
    ),
    False: (
        "[dull|boring|tedious|lifeless|bad|awful|terrible|disappointing|forgettable|shallow|annoying|pointless|painful]",
        "[lazy|bland|tiresome|hollow|exhausting|weak|messy|empty|joyless|stupid|dreary|unpleasant]",
    ),
}

PREDICATES = {
    True: (
        "a [pleasure|joy|delight|treat] [to watch|from start to finish]",
        "one of the [best|finest|funniest|warmest] {genres} [of the year|I have seen|in years]",
        "worth [the wait|seeing twice|every minute|the ticket]",
        "hard to [forget|fault|resist|turn off]",
        "easy to [love|recommend|enjoy]",
        "better than I [expected|had hoped|was told]",
        "full of [life|heart|surprises|warmth|wit]",
        "not bad at all",
        "a small [gem|miracle|wonder|treasure]",
    ),
    False: (
        "a [chore|trial|pain|struggle] [to watch|to sit through|from start to finish]",
        "one of the [worst|dullest|laziest|silliest] {genres} [of the year|I have seen|in years]",
        "not worth [the wait|seeing|your time|the ticket]",
        "hard to [watch|follow|like|sit through]",
        "easy to [forget|dislike|ignore]",
        "worse than I [expected|had feared|was told]",
        "full of [holes|noise|empty talk|tired ideas|cliches]",
        "not good at all",
        "a waste of [two hours|a good cast|a fine idea|time and money]",
    ),
}

# What may follow the predicate in the opening sentence, up to its full stop.
TAILS = {
    True: (
        ", and {A} {A_was} a big part of [that|it]",
        ", and {A} {A_was} the best part",
        ", from the {A_bare} to the {B_bare}",
        ", with {A_some} and {B_some}",
        " because {A} {A_was} so {A_adj}",
        ", thanks to the {A_bare}",
        ", [even though|although] {O} {O_was} {O_adj}",
        ", [despite|in spite of] the {O_bare}",
        " and {A} {A_was} {A_adj}",
    ),
    False: (
        ", and {A} {A_was} a big part of [that|it]",
        ", and {A} {A_was} the worst part",
        ", from the {A_bare} to the {B_bare}",
        ", with {A_some} and {B_some}",
        " because {A} {A_was} so {A_adj}",
        ", no thanks to the {A_bare}",
        ", [even though|although] {O} {O_was} {O_adj}",
        ", [despite|in spite of] the {O_bare}",
        " and {A} {A_was} {A_adj}",
    ),
}

# A mixed opening: something that could go either way, and the turn that decides.
MIXED = {
    True: (
        "[slow|confusing|hard to follow] at first",
        "[a bit|a little|rather] [long|loud|old-fashioned|uneven|sentimental]",
        "[strange|silly|predictable|rough] in places",
        "not what I expected",
    ),
    False: (
        "[promising|fun|interesting|funny] at first",
        "[pretty|nice] to look at",
        "[clever|amusing|touching|exciting] in places",
        "not what I expected",
    ),
}

TURNS = {
    True: (
        "[but|yet] it won me over [in the end|completely|by the last scene]",
        "but I [loved|enjoyed|liked] it [anyway|all the same|a lot]",
        "but {A} [made up for it|saved it|made it worth seeing]",
        "but I would [gladly|happily] [see|watch] it again",
    ),
    False: (
        "[but|yet] it [fell apart|ran out of steam|went nowhere] [in the end|halfway through|after an hour]",
        "but I was [bored|tired|lost] [long before the end|by the middle|within the hour]",
        "but {A} [ruined it|sank it|spoiled it for me]",
        "but I could not wait for it to [end|be over]",
    ),
}

VERBS = {
    True: (
        "won me over",
        "kept me [smiling|glued to the screen|on the edge of my seat]",
        "stayed with me for [days|a week|weeks]",
        "deserves [to be seen|a wide audience|every prize it gets]",
    ),
    False: (
        "left me cold",
        "put me to sleep",
        "bored me [to tears|from start to finish]",
        "never came to life",
        "wasted [two hours of my life|my evening|my time]",
    ),
}

FEELINGS = {
    True: "I [really|truly|simply|] [loved|enjoyed|adored]",
    False: "I [really|truly|simply|] [disliked|hated|regretted|did not enjoy]",
}

ASPECT_SENTENCES = {
    True: (
        "{A} {A_was} [really|truly|very|] {A_adj}",
        "{A} {A_was} {A_adj} and {A_adj2}",
        "I [loved|enjoyed|admired] the {A_bare}",
        "[what stayed with me|the best thing about it|what I liked most] was the {A_bare}",
        "{A} {A_was} {A_adj}, and {B} {B_was} [even better|just as good]",
    ),
    False: (
        "{A} {A_was} [really|truly|very|] {A_adj}",
        "{A} {A_was} {A_adj} and {A_adj2}",
        "I [hated|could not stand|was put off by] the {A_bare}",
        "[what ruined it for me|the worst thing about it|what I liked least] was the {A_bare}",
        "{A} {A_was} {A_adj}, and {B} {B_was} [even worse|no better|just as bad]",
    ),
}

CONCESSIONS = {
    True: (
        "[although|even though|while] {O} {O_was} {O_adj}, {A} {A_was} {A_adj}",
        "{O} [may have been|was perhaps|could be] {O_adj}, but {A} {A_was} {A_adj}",
        "[despite|in spite of] the {O_bare}, I [cared|was moved|had a good time]",
        "even the {O_bare} could not [spoil|ruin] it",
    ),
    False: (
        "[although|even though|while] {O} {O_was} {O_adj}, {A} {A_was} {A_adj}",
        "{O} [may have been|was perhaps|could be] {O_adj}, but {A} {A_was} {A_adj}",
        "[despite|in spite of] the {O_bare}, I [did not care|felt nothing|was bored]",
        "even the {O_bare} could not [save|rescue] it",
    ),
}

PLOTS = (
    "it follows {lead} who {situation}",
    "it tells the story of {lead} who {situation}",
    "it is about {lead} who {situation}",
)

LEAD_REMARKS = {
    True: (
        "I [cared about|worried about|believed in] {him} from the first scene",
        "{his} [grief|hope|courage|loneliness|joy] felt [real|true|honest]",
        "I was on {his} side all the way",
    ),
    False: (
        "I never cared what [happened to|became of] {him}",
        "{his} [grief|hope|courage|loneliness|joy] never felt [real|true|honest]",
        "we learn [nothing|next to nothing|too little] about {him}",
    ),
}

CLOSINGS = {
    True: (
        "I would [gladly|happily] [see|watch] it again",
        "I [recommend|would recommend] it to anyone who likes {genres}",
        "see it with [someone you love|your family|a good friend]",
        "[overall|all in all|in the end], it was [time|money|an evening] well spent",
        "[overall|all in all|in the end], I was glad that I saw it",
        "fans of {genres} will love it",
        "I give it [seven|eight|nine|ten] out of ten",
        "[do not miss it|go and see it]",
    ),
    False: (
        "I would not [see|watch] it again [for money|if you paid me]",
        "I [cannot|would not] recommend it to anyone, even people who like {genres}",
        "save your [money|time|evening] for something [better|else]",
        "[overall|all in all|in the end], it was [time|money|an evening] badly spent",
        "[overall|all in all|in the end], I was sorry that I saw it",
        "fans of {genres} will be let down",
        "I give it [one|two|three|four] out of ten",
        "[stay away|skip it|do not bother]",
    ),
}
