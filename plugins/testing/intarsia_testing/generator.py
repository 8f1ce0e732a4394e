"""Conformance of generators. Subclass, name your entry, give a small recipe, run pytest; a failure says which promise is broken, in words.

    class TestEngine(GeneratorConformance):
        entry = "acme-engine:engine"

        def recipe(self):
            return tiny_recipe()

The promises are those of `intarsia_rl.contracts.Generator`. What a generator says is compared with one pass over the whole sequence by the recipe's model, with the weights of the very version
that a token says it is of.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from intarsia.contracts import Media
from intarsia.errors import IntarsiaError, NumericsError, UsageError
from intarsia.plugins import current
from intarsia_rl.contracts import Generated, Generator, PlacedMedia, Request

from intarsia_testing.generator_case import GeneratorCase
from intarsia_testing.promise import broken, keep

SEEDS = (101, 202, 303)
"""Seeds of the weights that tests push."""


class GeneratorConformance(GeneratorCase):
    """Every promise of `intarsia_rl.contracts.Generator`, one test each.

    Set `entry` and `config` (small caches and steps, so that prompts are cut and blocks run out), override `recipe`. `tolerance` bounds the difference of log-probabilities
    between the generator and a pass over the whole sequence: 0.0 with `invariant` where they are equal bit for bit. One generator serves most tests of a class; a few build another one.
    `new_tokens` and `draws` bound the time.
    """

    # ------------------------------------------------------------ facts and completions

    def test_it_is_a_generator(self) -> None:
        """It has the methods, and its facts are those of the recipe."""
        generator, stage = self.stage().main(), self.stage()
        keep("is a generator", isinstance(generator, Generator), f"{generator!r} lacks a method of the contract.")
        facts = generator.facts
        keep("facts", facts.vocab_size == stage.recipe.model.vocab_size, f"facts.vocab_size is {facts.vocab_size}.")
        keep("facts", facts.max_tokens >= 64, f"facts.max_tokens is {facts.max_tokens}; the kit needs 64 or more.")
        keep("facts", facts.max_sequences >= 1, f"facts.max_sequences is {facts.max_sequences}.")
        unknown = set(facts.capabilities) - {"forced", "routes", "media", "invariant"}
        keep("facts", not unknown, f"facts.capabilities has {sorted(unknown)}, which mean nothing.")
        keep(
            "facts",
            self.invariant <= ("invariant" in facts.capabilities),
            "it was asked to be batch-invariant and does not say that it is.",
        )

    def test_the_recipe_can_tell(self) -> None:
        """Weights of two seeds, and a first token that differs, move log-probabilities by much more than the tolerance: else the other tests would prove nothing."""
        stage, tokens = self.stage(), self.prompts()[0]
        one = stage.log_probs(SEEDS[0], tokens)
        others = (stage.log_probs(SEEDS[1], tokens), stage.log_probs(SEEDS[0], (tokens[0] ^ 1, *tokens[1:])))
        apart = [max(abs(a - b) for a, b in zip(one[-8:], other[-8:], strict=True)) for other in others]
        least = max(100 * self.tolerance, 1e-4)
        keep(
            "recipe",
            min(apart) > least,
            f"other weights and another first token move the last log-probabilities by {apart} only: raise initial_std.",
        )

    def test_completions_are_the_models(self) -> None:
        """Prompts of all lengths together: greedy tokens are the likeliest, and log-probabilities those of a whole pass."""
        stage, generator = self.stage(), self.stage().main()
        requests = [self.request(prompt) for prompt in self.prompts()]
        for request, found in zip(requests, self.all_of(generator, requests), strict=True):
            words = f"a prompt of {len(request.tokens)} tokens"
            self.check(request, found, words)
            keep("length", len(found.tokens) == self.new_tokens and found.finish == "length", f"{words} ended by {found.finish} too early.")
            first = stage.next_log_probs(stage.seeds[found.versions[0]], request.tokens)
            best = float(first.max())
            keep(
                "greedy",
                best - float(first[found.tokens[0]]) <= 2 * self.tolerance,
                f"{words}: temperature 0 takes a token that is not the likeliest.",
            )

    def test_a_batch_is_each_alone(self) -> None:
        """What else runs, and in which order requests come, changes nothing; nor does drawing."""
        generator = self.stage().main()
        jobs: list[tuple[tuple[int, ...], dict[str, Any]]] = [
            (prompt, {"temperature": temperature, "seed": seed, "top_p": 0.9})
            for seed, (prompt, temperature) in enumerate(itertools.product(self.prompts(), (0.0, 0.9)))
        ]
        together = self.all_of(generator, [self.request(prompt, **settings) for prompt, settings in jobs])
        backwards = self.all_of(generator, [self.request(prompt, **settings) for prompt, settings in reversed(jobs)])
        alone = [self.one(generator, self.request(prompt, **settings)) for prompt, settings in jobs[::3]]
        for (prompt, settings), one, other in zip(jobs, together, reversed(backwards), strict=True):
            self.same("results are of the request alone", one, other, f"{len(prompt)} tokens with {settings} in another order")
        for one, other in zip(together[::3], alone, strict=True):
            self.same("results are of the request alone", one, other, "a request that ran alone")

    def test_more_requests_than_it_runs_at_once(self) -> None:
        """All of them end, as each alone would."""
        generator = self.stage().main()
        count = min(2 * generator.facts.max_sequences + 3, 40)
        requests = [self.request(self.prompts()[number % 5], temperature=1.0, seed=number, max_tokens=8) for number in range(count)]
        for request, found in zip(requests, self.all_of(generator, requests), strict=True):
            self.check(request, found, f"one of {count} requests")
            keep("all are served", len(found.tokens) == 8, f"{request.id} ended after {len(found.tokens)} tokens.")

    def test_lower_priority_numbers_are_served_earlier(self) -> None:
        """While more wait than can run: those of priority 0 are finished before those of priority 5 that came before them."""
        generator, order = self.stage().main(), []
        count = min(generator.facts.max_sequences, 16)

        async def one(priority: int) -> None:
            await generator.generate(self.request(self.prompts()[2], priority=priority, max_tokens=12, temperature=1.0))
            order.append(priority)

        async def work() -> None:
            await generator.pause()
            tasks = [asyncio.ensure_future(one(priority)) for priority in [5] * count + [0] * count]
            await self.settled(generator, lambda stats: stats.running + stats.waiting == len(tasks))
            await generator.resume()
            await asyncio.gather(*tasks)

        self.stage().run(work())
        if count == generator.facts.max_sequences:
            keep("priority", order[:count] == [0] * count, f"requests ended in the order of priorities {order}.")

    def test_seeds(self) -> None:
        """Equal seeds give equal tokens, other seeds others; greedy ignores them; what leaves one token over is greedy."""
        generator, prompt = self.stage().main(), self.prompts()[0]
        draws = self.all_of(generator, [self.request(prompt, temperature=1.0, seed=seed) for seed in (1, 1, 2, 3)])
        keep("seeds", draws[0].tokens == draws[1].tokens, "two requests of one seed differ.")
        keep("seeds", len({each.tokens for each in draws}) == 3, "requests of different seeds are equal.")
        greedy, *others = self.all_of(
            generator,
            [
                self.request(prompt),
                self.request(prompt, seed=9),
                self.request(prompt, temperature=1.0, top_k=1, seed=4),
                self.request(prompt, temperature=1.0, top_p=1e-6, seed=5),
                self.request(prompt, temperature=1.0, min_p=1.0, seed=6),
                self.request(prompt, temperature=1e-4, seed=7),
            ],
        )
        for other, words in zip(others, ("a seed", "top_k 1", "a tiny top_p", "min_p 1", "a tiny temperature"), strict=True):
            if not self.part_at_equals(prompt, greedy, other):
                self.same("greedy", greedy, other, f"greedy and {words}")

    def test_tokens_are_drawn_as_the_model_says(self) -> None:
        """First tokens over many seeds have the frequencies of the probabilities, with a temperature and top_k."""
        stage, generator, prompt, count = self.stage(), self.stage().main(), self.prompts()[2], self.draws
        settings: dict[str, Any] = {"temperature": 0.8, "top_k": 4, "max_tokens": 1}
        found = self.all_of(generator, [self.request(prompt, seed=seed, **settings) for seed in range(count)])
        log_probs = stage.next_log_probs(stage.seeds[found[0].versions[0]], prompt)
        best = log_probs.topk(4)
        expected = dict(zip(best.indices.tolist(), (best.values / 0.8).softmax(-1).tolist(), strict=True))
        outside = {each.tokens[0] for each in found} - set(expected)
        keep("top_k", not outside, f"top_k 4 drew {sorted(outside)}, which are not among the 4 likeliest tokens.")
        for token, share in expected.items():
            seen = sum(each.tokens[0] == token for each in found) / count
            bound = 4.5 * (share * (1 - share) / count) ** 0.5 + 1e-9
            keep("draws", abs(seen - share) <= bound, f"token {token} of probability {share:.3f} was drawn with frequency {seen:.3f}.")
        for each in found:
            keep(
                "log-probabilities",
                abs(each.log_probs[0] - float(log_probs[each.tokens[0]])) <= max(self.tolerance, 1e-6),
                "a drawn token's is not of temperature 1.",
            )

    def test_stop_ids_and_texts(self) -> None:
        """A stop id or text ends a completion and stays part of it."""
        stage, generator, prompt = self.stage(), self.stage().main(), self.prompts()[3]
        free = self.one(generator, self.request(prompt, temperature=1.0, seed=3))
        place = next(place for place in range(3, len(free.tokens)) if free.tokens[place] not in free.tokens[:place])
        stopped = self.one(generator, self.request(prompt, temperature=1.0, seed=3, stop_ids=(free.tokens[place],)))
        keep(
            "stop ids", stopped.finish == "eos" and stopped.tokens == free.tokens[: place + 1], f"stop id at token {place + 1}: {stopped}."
        )
        tokenizer: Any = current().build(stage.recipe.data.tokenizer)
        texts = [tokenizer.decode(free.tokens[: end + 1]) for end in range(len(free.tokens))]
        whole = [end for end in range(2, len(texts)) if "\N{REPLACEMENT CHARACTER}" not in texts[end][-3:] and len(texts[end].strip()) > 1]
        if not whole:
            return
        stop = texts[whole[0]][-2:]
        first = next(end for end in range(len(texts)) if stop in texts[end])
        stopped = self.one(generator, self.request(prompt, temperature=1.0, seed=3, stop=(stop,)))
        keep(
            "stop texts",
            stopped.finish == "stop",
            f"the stop text {stop!r} is in the completion {texts[-1]!r}, which ended by {stopped.finish}.",
        )
        keep(
            "stop texts",
            stopped.tokens == free.tokens[: first + 1],
            f"the stop text {stop!r} is complete with token {first + 1}, and the completion has {len(stopped.tokens)}.",
        )

    def test_tokens_are_told_as_they_come(self) -> None:
        """`on_tokens` is told of every token once and in order, before the call returns."""
        generator, told = self.stage().main(), list[int]()
        calls = list[int]()

        def tell(tokens: Sequence[int]) -> None:
            told.extend(tokens)
            calls.append(len(tokens))

        found = self.stage().run(generator.generate(self.request(self.prompts()[0]), tell))
        keep("on_tokens", tuple(told) == found.tokens, f"it was told of {told}, and the completion is {found.tokens}.")
        keep("on_tokens", len(calls) > 1, "all tokens were told at once.")

    def test_forced_tokens_are_scored(self) -> None:
        """Forced tokens are taken as they are, whatever stop rules say, and have the log-probabilities that they have."""
        generator = self.stage().main()
        if "forced" not in generator.facts.capabilities:
            self.refused("capabilities", generator, self.request(self.prompts()[0], forced=(1, 2)), "a request with forced tokens")
            return
        for prompt in self.prompts():
            drawn = self.one(generator, self.request(prompt, temperature=1.0, seed=11))
            request = self.request(prompt, forced=drawn.tokens, stop_ids=drawn.tokens[:3])
            scored = self.one(generator, request)
            keep("forced tokens", scored.tokens == drawn.tokens and scored.finish == "length", f"{drawn.tokens} became {scored.tokens}.")
            self.check(request, scored, "a scored completion")
        some = self.request(prompt, forced=drawn.tokens[:5], max_tokens=self.new_tokens)
        longer = self.one(generator, some)
        keep(
            "forced tokens",
            longer.tokens[:5] == drawn.tokens[:5] and len(longer.tokens) == self.new_tokens,
            "it does not go on behind forced tokens.",
        )
        self.check(some, longer, "a completion behind forced tokens")

    def test_routes(self) -> None:
        """Experts are those that a whole pass chooses, for all tokens but the last, those of a cached prefix included."""
        stage, generator = self.stage(), self.stage().main()
        if "routes" not in generator.facts.capabilities:
            self.refused("capabilities", generator, self.request(self.prompts()[0], routes=True), "a request for routes")
            return
        import numpy as np

        for prompt in (*self.prompts(), self.prompts()[0]):
            found = self.one(generator, self.request(prompt, routes=True, temperature=1.0))
            tokens = (*prompt, *found.tokens)
            keep("routes", found.routes is not None, "a request for routes got none.")
            assert found.routes is not None, "kept above"
            expected = stage.routes(stage.seeds[found.versions[-1]], tokens)[:-1]
            keep(
                "routes",
                found.routes.shape == tuple(expected.shape),
                f"routes have shape {found.routes.shape}, not {tuple(expected.shape)}.",
            )
            chosen = np.frombuffer(found.routes.data, "<i2").reshape(found.routes.shape)
            agree = float((np.sort(chosen, -1) == np.sort(expected.numpy(), -1)).all(-1).mean())
            least = 1.0 if self.tolerance == 0 else 0.97
            keep("routes", agree >= least, f"{agree:.1%} of the choices are those of a whole pass.")
        plain = self.one(generator, self.request(prompt))
        keep("routes", plain.routes is None, "a request that did not ask for routes got some.")

    def test_a_known_prefix_changes_nothing(self) -> None:
        """The second time a prompt is read from the prefix cache, where there is one, and all is as the first time."""
        stage = self.stage()
        generator = stage.fresh(SEEDS[0])
        prompt = self.prompts()[0]
        first = self.one(generator, self.request(prompt))
        # Longer, shorter, another first token, and parts of it elsewhere: equal tokens behind others must not be taken for the same.
        others = ((*prompt, *first.tokens, 3, 4), prompt[:-1], (prompt[0] ^ 1, *prompt[1:]), prompt[4:], prompt[16:])
        requests = [self.request(tokens) for tokens in (prompt, *others)]
        results = self.all_of(generator, requests)
        self.same("a cached prefix", first, results[0], "the same prompt for the second time")
        keep("cached tokens", first.cached_tokens == 0, f"a fresh generator says that {first.cached_tokens} tokens were cached.")
        for request, found in zip(requests, results, strict=True):
            self.check(request, found, "a prompt whose prefix is known")
            keep(
                "cached tokens",
                0 <= found.cached_tokens < len(request.tokens),
                f"{found.cached_tokens} of {len(request.tokens)} prompt tokens were cached.",
            )

    # ------------------------------------------------------------ weights

    def test_nothing_is_served_without_weights(self) -> None:
        """Before its first update a generator answers nothing: a request waits, or is refused."""
        stage = self.stage()
        generator = stage.build()
        request = self.request(self.prompts()[0])

        async def work() -> Generated | BaseException:
            task = asyncio.ensure_future(generator.generate(request))
            await asyncio.wait([task], timeout=0.5)
            keep("no weights, no tokens", not task.done() or task.exception() is not None, "it generated without weights.")
            await generator.update(stage.publish(SEEDS[1]))
            (result,) = await asyncio.gather(task, return_exceptions=True)
            return result

        before = stage.run(generator.stats())
        keep("stats", before.version == -1, f"without weights stats().version is {before.version}.")
        result = stage.run(work())
        if isinstance(result, Generated):
            self.check(request, result, "a request that waited for weights")
        else:
            keep("no weights, no tokens", isinstance(result, IntarsiaError), f"it raises {type(result).__name__} ({result}).")

    def test_after_an_update_it_is_a_fresh_one(self) -> None:
        """The same prompts before and after: everything that is kept belongs to a version. An update to the same weights changes nothing."""
        stage, generator = self.stage(), self.stage().main()
        prompts = self.prompts()
        requests = [self.request(prompt) for prompt in prompts]
        if "media" in generator.facts.capabilities:
            tokens, media = self.shown()
            requests.append(dataclasses.replace(self.request(tokens), media=media))
        before = self.all_of(generator, [self.again(request) for request in requests])
        stage.run(generator.update(stage.publish(SEEDS[0])))
        after = self.against_fresh(generator, stage.fresh(SEEDS[0]), requests)
        weights = stage.publish(SEEDS[0])
        stage.run(generator.update(weights))
        again = self.all_of(generator, [self.again(request) for request in requests])
        for number, request in enumerate(requests):
            words = f"a prompt of {len(request.tokens)} tokens"
            self.same(
                "an equal update changes nothing", after[number], again[number], f"{words}, before and after an update to equal weights"
            )
            found = set(again[number].versions)
            keep("versions", found == {weights.version}, f"{words}: versions {found} after version {weights.version}.")
            keep("updates", before[number].log_probs != after[number].log_probs, f"{words}: new weights changed nothing.")

    def test_versions_do_not_go_back(self) -> None:
        """The version it has is taken at once, an older one is refused."""
        stage, generator = self.stage(), self.stage().main()
        old, new = stage.publish(SEEDS[1]), stage.publish(SEEDS[2])
        stage.run(generator.update(new))
        stage.run(generator.update(new))
        try:
            stage.run(generator.update(old))
        except UsageError:
            pass
        else:
            broken("versions do not go back", f"version {old.version} was taken after {new.version}.")
        request = self.request(self.prompts()[0])
        found = self.one(generator, request)
        self.check(request, found, "a request after a refused update")
        keep("versions do not go back", set(found.versions) == {new.version}, f"tokens are of versions {set(found.versions)}.")

    def test_torn_weights_are_never_served(self) -> None:
        """Weights that are not what was published are a NumericsError with the tensor's name; no token comes of them."""
        stage, generator = self.stage(), self.stage().main()
        stage.run(generator.update(stage.publish(SEEDS[0])))
        held = stage.run(generator.stats()).version
        weights = stage.publish(SEEDS[1])
        name = sorted(weights.digests)[len(weights.digests) // 2]
        torn = dataclasses.replace(weights, digests={**weights.digests, name: "0" * len(weights.digests[name])})
        try:
            stage.run(generator.update(torn))
        except NumericsError as error:
            keep("torn weights", name in str(error), f"the error does not name {name}: {error}")
        except Exception as error:
            broken("torn weights", f"a digest that differs raises {type(error).__name__} ({error}), not NumericsError.")
        else:
            broken("torn weights", "weights whose digest differs were taken.")
        after = stage.run(generator.stats()).version
        keep("torn weights", after in (-1, held), f"after a failed update the version is {after}; it must be {held} or -1 (none).")
        request = self.request(self.prompts()[0])

        async def work() -> Generated | BaseException:
            task = asyncio.ensure_future(generator.generate(request))
            await asyncio.wait([task], timeout=0.5)
            if task.done() and task.exception() is None:
                keep("torn weights", set(task.result().versions) == {held}, f"tokens came of version {set(task.result().versions)}.")
            await generator.update(stage.publish(SEEDS[2]))
            (result,) = await asyncio.gather(task, return_exceptions=True)
            return result

        result = stage.run(work())
        if isinstance(result, Generated):
            self.check(request, result, "a request around a failed update")

    def test_requests_continue_with_new_weights(self) -> None:
        """Each token of a request that lives through updates is what the weights of its version say, given all before it: caches of two versions are never mixed."""
        stage = self.stage()
        found = self.around([stage.publish(SEEDS[0]), stage.publish(SEEDS[1])], "continue")
        for request, result in found:
            self.check(request, result, f"a request around two updates, versions {sorted(set(result.versions))}")
        most = max(len(set(result.versions)) for _, result in found)
        keep("in-flight updates", most > 1, "no request went on with the new weights: all of them ended before, or were drained.")

    def test_requests_are_drained(self) -> None:
        """With `drain` requests that run end with the weights that they began with; what comes later has the new ones."""
        stage, generator = self.stage(), self.stage().main()
        weights = stage.publish(SEEDS[2])
        for request, result in self.around([weights], "drain"):
            self.check(request, result, "a drained request")
            keep("drain", len(set(result.versions)) == 1, f"a request has tokens of versions {sorted(set(result.versions))}.")
        later = self.one(generator, self.request(self.prompts()[0]))
        keep("drain", set(later.versions) == {weights.version}, f"after the update tokens are of versions {set(later.versions)}.")

    # ------------------------------------------------------------ pauses and ends

    def test_pause_and_resume(self) -> None:
        """While paused no token comes; afterwards everything goes on as if nothing had been."""
        generator, prompts = self.stage().main(), self.prompts()
        free = self.all_of(generator, [self.request(prompt, temperature=1.0, seed=5) for prompt in prompts])
        told = list[int]()

        async def work() -> list[Generated]:
            some = asyncio.Event()

            def tell(tokens: Sequence[int]) -> None:
                told.extend(tokens)
                some.set()

            tasks = [asyncio.ensure_future(generator.generate(self.request(prompt, temperature=1.0, seed=5), tell)) for prompt in prompts]
            await some.wait()
            await generator.pause()
            await asyncio.sleep(0.05)
            count = len(told)
            await asyncio.sleep(0.2)
            keep("pause", len(told) == count, f"{len(told) - count} tokens came while it was paused.")
            keep("stats", (await generator.stats()).paused, "stats().paused is False while it is paused.")
            await generator.resume()
            return list(await asyncio.gather(*tasks))

        for one, other in zip(free, self.stage().run(work()), strict=True):
            self.same("pause", one, other, "a request that was paused")

    def test_pause_that_finishes(self) -> None:
        """With keep False requests that run are finished, and none is begun before `resume`."""
        generator = self.stage().main()

        async def work() -> None:
            some, begun = asyncio.Event(), asyncio.Event()
            running = asyncio.ensure_future(generator.generate(self.request(self.prompts()[0]), lambda tokens: some.set()))
            await some.wait()
            await generator.pause(keep=False)
            later = asyncio.ensure_future(generator.generate(self.request(self.prompts()[2]), lambda tokens: begun.set()))
            await asyncio.wait([running], timeout=self.patience_s)
            await asyncio.wait([later], timeout=0.3)
            keep("pause", running.done(), "a request that ran was not finished.")
            keep("pause", not later.done() and not begun.is_set(), "a request was begun while it was paused.")
            await generator.resume()
            keep("pause", len((await later).tokens) == self.new_tokens, "a request that waited did not run to its end.")

        self.stage().run(work())

    def test_abort(self) -> None:
        """Aborted requests return with what they have, others are not touched; ids that are not known are ignored."""
        generator, prompts = self.stage().main(), self.prompts()
        free = self.all_of(generator, [self.request(prompt, temperature=1.0, seed=6) for prompt in prompts])

        async def work(which: Sequence[int] | None) -> list[tuple[Request, Generated]]:
            for _ in range(self.tries):
                requests = [self.request(prompt, temperature=1.0, seed=6) for prompt in prompts]
                tasks, some = self.under_way(generator, requests)
                await some.wait()
                await self.paused(generator)
                in_time = not any(tasks[number].done() for number in which or range(len(tasks)))
                await generator.abort(None if which is None else [*(requests[number].id for number in which), "no-such-request"])
                await generator.resume()
                found = list(zip(requests, await asyncio.gather(*tasks), strict=True))
                if in_time:
                    break
            return found

        for number, (whole, (request, each)) in enumerate(zip(free, self.stage().run(work((0, 3))), strict=True)):
            if number in (0, 3):
                keep("abort", each.finish == "abort", f"an aborted request ended by {each.finish}.")
                keep("abort", each.tokens == whole.tokens[: len(each.tokens)], "what an aborted request has is not what it would have had.")
                self.check(request, each, "an aborted request")
            else:
                self.same("abort", whole, each, "a request beside aborted ones")
        keep("abort", {each.finish for _, each in self.stage().run(work(None))} == {"abort"}, "abort() did not end all requests.")
        stats = self.stage().run(generator.stats())
        keep("abort", (stats.running, stats.waiting) == (0, 0), f"after abort() {stats.running} requests run and {stats.waiting} wait.")

    def test_cancelled_calls_leave_nothing(self) -> None:
        """A call that is cancelled frees its place; others go on."""
        generator = self.stage().main()
        free = self.one(generator, self.request(self.prompts()[0]))

        async def work() -> Generated:
            some = asyncio.Event()
            lost = [asyncio.ensure_future(generator.generate(self.request(prompt), lambda tokens: some.set())) for prompt in self.prompts()]
            kept = asyncio.ensure_future(generator.generate(self.request(self.prompts()[0])))
            await some.wait()
            await generator.pause()
            for task in lost:
                task.cancel()
            await asyncio.gather(*lost, return_exceptions=True)
            stats = await self.settled(generator, lambda stats: stats.running + stats.waiting <= 1)
            keep(
                "cancelling",
                stats.running + stats.waiting <= 1,
                f"{stats.running} requests run and {stats.waiting} wait; somebody waits for one of them.",
            )
            await generator.resume()
            return await kept

        self.same("cancelling", free, self.stage().run(work()), "a request beside cancelled ones")
        stats = self.stage().run(generator.stats())
        keep(
            "cancelling",
            (stats.running, stats.waiting) == (0, 0),
            f"{stats.running} requests run and {stats.waiting} wait that nobody waits for.",
        )

    def test_the_loop_stays_responsive(self) -> None:
        """The event loop is not blocked while tokens are computed: it serves others many times over."""
        generator = self.stage().main()

        async def work() -> int:
            turns = 0
            task = asyncio.ensure_future(generator.generate(self.request(self.prompts()[0])))
            while not task.done():
                turns += 1
                await asyncio.sleep(0.0005)
            return turns

        for _ in range(self.tries):
            if (turns := self.stage().run(work())) > 3:
                break
        keep("responsive", turns > 3, f"the loop came to its turn {turns} times during {self.new_tokens} tokens.")

    # ------------------------------------------------------------ what is refused

    def test_impossible_requests_are_usage_errors(self) -> None:
        """Too long, tokens outside of the vocabulary, no prompt, capabilities that are missing, settings out of range."""
        generator = self.stage().main()
        facts, prompt = generator.facts, self.prompts()[2]
        cases = {
            "a request longer than facts.max_tokens": self.request(prompt, max_tokens=facts.max_tokens - len(prompt) + 1),
            "a token outside of the vocabulary": self.request((*prompt, facts.vocab_size)),
            "a negative token": self.request((-1, *prompt)),
            "an empty prompt": self.request(()),
            "max_tokens 0": self.request(prompt, max_tokens=0),
            "a negative temperature": self.request(prompt, temperature=-1.0),
            "top_p 0": self.request(prompt, top_p=0.0),
            "top_k 0": self.request(prompt, top_k=0),
        }
        if "forced" in facts.capabilities:
            cases["a forced token outside of the vocabulary"] = self.request(prompt, forced=(facts.vocab_size,))
        if "media" not in facts.capabilities:
            cases["media"] = dataclasses.replace(self.request(prompt), media=(PlacedMedia(Media("image", b""), 0),))
        for words, request in cases.items():
            self.refused("impossible requests", generator, request, words)
        longest = self.request(prompt, max_tokens=facts.max_tokens - len(prompt))
        if facts.max_tokens <= 512:
            keep(
                "max_tokens",
                len(self.one(generator, longest).tokens) == longest.sampling.max_tokens,
                "a request of facts.max_tokens is cut.",
            )

    def test_stats_count(self) -> None:
        """Counts go up by what was done."""
        stage, generator = self.stage(), self.stage().main()
        before = stage.run(generator.stats())
        found = self.all_of(generator, [self.request(prompt) for prompt in self.prompts()])
        after = stage.run(generator.stats())
        made = sum(len(each.tokens) for each in found)
        keep(
            "stats",
            after.generated_tokens - before.generated_tokens == made,
            f"{made} tokens were generated; stats say {after.generated_tokens - before.generated_tokens}.",
        )
        keep("stats", after.version == found[0].versions[-1], f"stats().version is {after.version}.")
        keep("stats", after.busy_s > before.busy_s, "busy_s did not move.")
        keep("stats", 0 <= after.cache_used <= 1, f"cache_used is {after.cache_used}.")
        keep("stats", (after.running, after.waiting) == (0, 0), f"{after.running} run and {after.waiting} wait.")

    def test_closing(self) -> None:
        """It can be closed twice, ends what runs, and refuses what comes afterwards at once."""
        stage = self.stage()
        generator = stage.fresh(SEEDS[0])

        async def work() -> Generated | BaseException:
            some = asyncio.Event()
            task = asyncio.ensure_future(generator.generate(self.request(self.prompts()[0]), lambda tokens: some.set()))
            await some.wait()
            await generator.close()
            (result,) = await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), self.patience_s)
            await generator.close()
            return result

        result = stage.run(work())
        keep(
            "close",
            not isinstance(result, Generated) or result.finish in ("abort", "length"),
            f"a request that was running ended by {result!r}.",
        )
        try:
            self.one(generator, self.request(self.prompts()[0]))
        except IntarsiaError:
            return
        except Exception as error:
            broken("close", f"a request after close() raises {type(error).__name__} ({error}), not an IntarsiaError.")
        broken("close", "it serves a request after close().")
