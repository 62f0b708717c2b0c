"""Phrase templates about a film as a whole: openings, turns, judgements of aspects, closings.

In dicts of phrases the key is the verdict: True for positive, False for negative. Slots: {film}, {genre},
{genres}, {theme}; {adj}, {adj2} words for the whole film; {best} "best" or "worst"; {A}, {B} parts that share the
verdict and {O} a part that goes against it, each with {A_adj}, {A_adj2}, {A_was}, {A_bare} ("sharp script") and
{A_some} ("a sharp script").
"""

from demo.notation import lines, words

FILM_WORDS = ("movie", "movie", "movie", "film", "film")
SUBJECTS = ("This movie",) * 6 + ("This film",) * 2 + ("The movie",) * 2 + ("The film", "This {genre}", "The {genre}")
ADVERBS = ("really",) * 8 + ("truly", "genuinely", "simply") + ("",) * 5

FILM_ADJECTIVES = {
    True: words("""
        moving funny gripping clever charming beautiful thrilling warm original delightful powerful absorbing witty
        wonderful entertaining good great excellent impressive satisfying inventive heartfelt exciting lovely special
        touching enjoyable memorable smart uplifting
        """),
    False: words("""
        dull boring tedious lifeless bad awful terrible disappointing forgettable shallow annoying pointless painful
        lazy bland tiresome hollow exhausting weak messy empty joyless stupid dreary unpleasant clumsy silly cold
        noisy aimless
        """),
}

# Predicates after "This movie was really", other than one or two adjectives.
PREDICATES = {
    True: lines("""
        a [pleasure|joy|delight|treat] [to watch|from start to finish]
        one of the [best|finest|smartest|warmest] {genres} [of the year|I have seen|in years]
        the best thing I have seen [this year|in months|in a long time]
        worth [the wait|seeing twice|every minute|the ticket]
        hard to [forget|fault|resist|turn off]
        easy to [love|recommend|enjoy]
        better than I [expected|had hoped]
        [funnier|smarter|warmer|sharper|richer] than I [expected|had hoped]
        full of [life|heart|surprises|warmth|wit]
        good
        good [from beginning to end|in every way]
        not [bad|bad at all|dull for a minute]
        a small [gem|miracle|wonder|treasure]
        exactly the {genre} I [needed|was hoping for]
        everything a {genre} should be
        made with [love|care|great skill]
        [lifted|carried|held together] by the {A_bare}
        """),
    False: lines("""
        a [chore|trial|pain|struggle] [to watch|to sit through|from start to finish]
        one of the [worst|dullest|laziest|weakest] {genres} [of the year|I have seen|in years]
        the worst thing I have seen [this year|in months|in a long time]
        not worth [the wait|seeing|your time|the ticket]
        hard to [watch|finish|like|sit through]
        easy to [forget|dislike|ignore]
        worse than I [expected|had feared]
        [duller|weaker|colder|sillier|longer] than I [expected|had feared]
        full of [holes|noise|empty talk|tired ideas]
        bad
        bad [from beginning to end|in every way]
        not [good|good at all|funny for a minute]
        a waste of [two hours|a good cast|a fine idea|time and money]
        exactly the kind of {genre} I try to avoid
        everything a {genre} should not be
        made without [love|care|any skill]
        [ruined|spoiled|dragged down] by the {A_bare}
        """),
}

# "so funny that ..." takes no other adverb.
CONSEQUENCES = {
    True: lines("""
        I saw it twice
        I forgot the time
        I did not want it to end
        I told all my friends about it
        I stayed for the credits
        """),
    False: lines("""
        I fell asleep
        I left early
        I wanted my money back
        I started to count the seats
        I felt sorry for the actors
        """),
}

# Continuations of the opening sentence.
TAILS = lines("""
    , and {A} {A_was} a big part of [that|it]
    , and {A} {A_was} the {best} part
    , and {A} {A_was} [the reason why|one reason why]
    , from the {A_bare} to the {B_bare}
    , with {A_some} and {B_some}
    because {A} {A_was} so {A_adj}
    , [largely|partly|] thanks to the {A_bare}
    , [even though|although] {O} {O_was} {O_adj}
    , [despite|in spite of] the {O_bare}
    , and {A} {A_was} {A_adj}
    """)

# Ambivalent openings, and the turn that decides.
MIXED = {
    True: lines("""
        [slow|confusing|hard to follow] at first
        [long|loud|old-fashioned|sentimental]
        [strange|uneven|predictable|rough] in places
        not what I expected
        """),
    False: lines("""
        [promising|fun|interesting|tense] at first
        [pretty|nice] to look at
        [colorful|amusing|ambitious] in places
        not what I expected
        """),
}
TURNS = {
    True: lines("""
        [but|yet] it won me over [in the end|completely|by the last scene]
        but I [loved|enjoyed|liked] it [anyway|all the same]
        but {A} [made up for it|saved it|made it worth seeing]
        but I would [gladly|happily] [see|watch] it again
        """),
    False: lines("""
        [but|yet] it [fell apart|ran out of steam|went nowhere] [in the end|halfway through|after an hour]
        but I was [bored|tired|lost] [long before the end|by the middle|within the hour]
        but {A} [ruined it|sank it|spoiled it for me]
        but I could not wait for it to [end|be over]
        """),
}

# Other openings.
OPENINGS = {
    True: lines("""
        I [really|truly|simply|] [loved|enjoyed|adored] this {film}
        I [really|truly|simply|] [loved|enjoyed|adored] this {film} because {A} {A_was} so {A_adj}
        [this|the] {film} won me over with its {A_bare}
        [this|the] {film} kept me [smiling|glued to the screen|on the edge of my seat] from start to finish
        [this|the] {film} stayed with me for [days|a week|weeks], and {A} {A_was} the best part
        I have [never|rarely|seldom] seen a {film} so {adj}
        if you like {genres}, you will [love|enjoy] this {film}
        {subject} was {adverb} about {theme}, and it handled the subject with [care|wit|love]
        {subject} was {adverb} about {theme}, and I have [rarely|never] seen it done [better|with more care]
        """),
    False: lines("""
        I [really|truly|simply|] [disliked|hated|regretted] this {film}
        I [really|truly|simply|] [disliked|hated|regretted] this {film} because {A} {A_was} so {A_adj}
        [this|the] {film} lost me with its {A_bare}
        [this|the] {film} bored me [to tears|from start to finish]
        [this|the] {film} put me to sleep, and {A} {A_was} the worst part
        I have [never|rarely|seldom] seen a {film} so {adj}
        even if you like {genres}, you will [hate|be bored by] this {film}
        {subject} was {adverb} about {theme}, but it had nothing [new|true] to say about it
        {subject} was {adverb} about {theme}, but it never got below the surface
        """),
}

PARTS = {
    True: lines("""
        {A} {A_was} [really|truly|] {A_adj}
        {A} {A_was} {A_adj} and {A_adj2}
        I [loved|enjoyed|admired] the {A_bare}
        [what stayed with me|the best thing about the {film}|what I liked most] was the {A_bare}
        {A} {A_was} {A_adj}, and {B} {B_was} [even better|just as good]
        """),
    False: lines("""
        {A} {A_was} [really|truly|] {A_adj}
        {A} {A_was} {A_adj} and {A_adj2}
        I [hated|could not stand|was put off by] the {A_bare}
        [what lost me|the worst thing about the {film}|what I liked least] was the {A_bare}
        {A} {A_was} {A_adj}, and {B} {B_was} [even worse|no better]
        """),
}

# A further aspect that agrees with an earlier one.
MORE = {
    True: lines("""
        {A} made the {film} even better
        {A} {A_was} {A_adj} too
        it helped that {A} {A_was} {A_adj}
        I also [loved|enjoyed|admired] the {A_bare}
        """),
    False: lines("""
        {A} only made the {film} worse
        {A} {A_was} {A_adj} too
        it did not help that {A} {A_was} {A_adj}
        nor did I care for the {A_bare}
        """),
}

CONCESSIONS = {
    True: lines("""
        [although|even though|while] {O} {O_was} {O_adj}, {A} {A_was} {A_adj}
        {O} [may have been|could have been less] {O_adj}, but {A} {A_was} {A_adj}
        [despite|in spite of] the {O_bare}, I [cared deeply|was moved|had a good time]
        even the {O_bare} could not [spoil|ruin] it
        """),
    False: lines("""
        [although|even though|while] {O} {O_was} {O_adj}, {A} {A_was} {A_adj}
        {O} [may have been|{O_was} certainly] {O_adj}, but {A} {A_was} {A_adj}
        [despite|in spite of] the {O_bare}, I [did not care|felt nothing|was bored]
        even the {O_bare} could not [save|rescue] it
        """),
}
ADMISSIONS = lines("""
    I will admit that {O} {O_was} {O_adj}
    [it is true that|to be fair,] {O} {O_was} {O_adj}
    """)
# Answers to a concession.
ANSWERS = {
    True: lines("""
        [still|even so|all the same], {A} {A_was} {A_adj}
        [still|even so|all the same], {A} made up for [that|everything]
        [still|even so|all the same], {A} {A_was} so {A_adj} that I [did not mind|forgave it]
        [still|even so|all the same], I [could not help [liking|loving] it|was won over|had a wonderful time]
        """),
    False: lines("""
        [sadly|unfortunately|even so], {A} {A_was} {A_adj}
        [sadly|unfortunately|even so], {A} [ruined|spoiled] [everything|the rest]
        [sadly|unfortunately|even so], {A} {A_was} so {A_adj} that I [did not care|gave up]
        [sadly|unfortunately|even so], I [could not bring myself to [care|like it]|lost patience|felt nothing at all]
        """),
}

PLOTS = lines("""
    the [film|story] follows {lead} who {situation}
    it tells the story of {lead} who {situation}
    [at its center|at the heart of it] {is} {lead} who {situation}
    """)
LEAD_REMARKS = {
    True: lines("""
        I [cared about|worried about|believed in] {him} from the first scene
        {his} [grief|hope|courage|loneliness|joy] felt [real|true|honest]
        I was on {his} side all the way
        everything {he} said sounded [true|real|honest]
        I wanted so much for {him} to [win|be happy|find peace]
        """),
    False: lines("""
        I never cared what [happened to|became of] {him}
        {his} [grief|hope|courage|loneliness|joy] never felt [real|true|honest]
        we learned [nothing|next to nothing|too little] about {him}
        nothing {he} said sounded [true|real|honest]
        I stopped believing in {him} [after ten minutes|before the titles were over]
        """),
}

# Remarks on how well the film serves its genre; {remark} comes from `genres`.
GENRE_REMARKS = {
    True: lines("""
        {remark}
        as a~ {genre} it [worked|succeeded]: {remark}
        """),
    False: lines("""
        {remark}
        as a~ {genre} it [failed|fell flat]: {remark}
        """),
}

# The rest of the audience, and the book.
COMPANY = {
    True: lines("""
        my [wife|husband|brother|sister|neighbor], who [avoids|never watches] {genres}, [wants to see it again|loved it]
        the people [behind|around] me [cheered|applauded] at the end
        the whole theater was [silent|smiling] when the lights came on
        I had read the book, and the {film} [does it justice|is even better]
        """),
    False: lines("""
        my [wife|husband|brother|sister|neighbor], who [adores|never misses] {genres}, [fell asleep|went home early]
        the people [behind|around] me [sighed|left] before the end
        half of the theater was [asleep|empty] when the lights came on
        I had read the book, and the {film} [flattens it|cannot compare]
        """),
}

CLOSINGS = {
    True: lines("""
        I would [gladly|happily] [see|watch] it again
        I [recommend|would recommend] it to anyone who likes {genres}
        see it with [someone you love|your family|a good friend]
        [overall|all in all|in the end], it was [time|money|an evening] well spent
        [overall|all in all|in the end], I was glad that I saw it
        fans of {genres} will love it
        I give it [seven|eight|nine|ten] out of ten
        [do not miss it|go and see it]
        """),
    False: lines("""
        I would not [see|watch] it again [for money|if you paid me]
        I [cannot|would not] recommend it to anyone, even people who like {genres}
        save your [money|time|evening] for something [better|else]
        [overall|all in all|in the end], it was [time|money|an evening] badly spent
        [overall|all in all|in the end], I was sorry that I saw it
        fans of {genres} will be let down
        I give it [one|two|three|four] out of ten
        [stay away|skip it|do not bother]
        """),
}
# Closings after a concession.
CLOSINGS_DESPITE = {
    True: "for all its [faults|flaws], I [was glad that I saw it|would see it again|recommend it]",
    False: "for all its [charms|efforts], I [was sorry that I saw it|would not see it again|cannot recommend it]",
}
