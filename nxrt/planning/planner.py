"""The plan: what a decode step of a model holds on each tier, and whether the budget admits it.

The sizes are those that the governor will be asked for. Of a model, weights and activations are not
among them: they belong to the engine. Nothing here allocates or looks at a device.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from nxrt.errors import InvalidInputError, SizeOverflowError
from nxrt.kernels.dsa_index_select.routes import planned_nbytes
from nxrt.kernels.dsa_index_select.spec import FLOAT_DTYPES, Shape, input_specs
from nxrt.memory.budget import MemoryBudget
from nxrt.memory.state_bytes import StateGroupLayout
from nxrt.memory.tier import PINNED, Role, Tier, device_tier
from nxrt.planning.geometry import (
    MAX_COUNT,
    Geometry,
    IndexerGeometry,
    LatentGeometry,
    StateGroupGeometry,
)
from nxrt.providers.cuda_session import GRAPH_NBYTES
from nxrt.storage import checked_int
from nxrt.tensor import DType, TensorSpec, checked_product

DEVICE = device_tier(0)
STAGING_NBYTES = 4 * 256 * 1024
"""The slots of one session's StagingRing."""

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


@dataclass(frozen=True)
class PlanLine:
    """State one item: where it is held, in which role, by whom, how large it is, what it is."""

    tier: Tier
    role: Role
    holder: str
    nbytes: int
    what: str


@dataclass(frozen=True)
class TierTotal:
    """Sum up one tier.

    Args:
        tier: which.
        nbytes: needed.
        limit: what the budget admits, None is no limit.
        capacity: measured bytes of the tier, None where nobody has measured.
    """

    tier: Tier
    nbytes: int
    limit: int | None
    capacity: int | None = None

    @property
    def fits(self) -> bool:
        """Return whether the budget admits it."""
        return self.limit is None or self.nbytes <= self.limit


@dataclass(frozen=True)
class RoleCap:
    """Compare what one role needs on a tier with the most that the budget lets it hold."""

    tier: Tier
    role: Role
    nbytes: int
    limit: int

    @property
    def fits(self) -> bool:
        """Return whether the cap admits it."""
        return self.nbytes <= self.limit


@dataclass(frozen=True)
class Plan:
    """Hold the answer.

    Args:
        geometry: of the model.
        context: tokens of each sequence.
        batch: number of sequences.
        lines: every item, tier by tier.
        totals: one for each tier that holds something.
        largest_batch: the most sequences that fit at this context; None is no limit.
        longest_context: the most tokens that fit at this batch, at most the model's own limit.
        caps: one for each role that has a cap and holds something. Caps of holders and requests
            are not looked at: who will hold what under which name is the engine's to say.
    """

    geometry: Geometry
    context: int
    batch: int
    lines: tuple[PlanLine, ...]
    totals: tuple[TierTotal, ...]
    largest_batch: int | None
    longest_context: int
    caps: tuple[RoleCap, ...] = ()

    @property
    def fits(self) -> bool:
        """Return whether every tier's budget admits its total, and every cap its role."""
        return all(total.fits for total in self.totals) and all(cap.fits for cap in self.caps)

    @property
    def budget_line(self) -> str:
        """Return the lines of the [budget] table to change, empty where the plan fits.

        One for each tier and each role that has too little, which as a rule is one. Sizes are
        rounded up.
        """
        capped = {cap.tier for cap in self.caps if not cap.fits}
        lines = []
        for total in self.totals:
            if not total.fits:
                # A tier whose roles are written too is a table.
                key = total.tier.kind.value + (".limit" if total.tier in capped else "")
                lines.append(f'{key} = "{_rounded_up(total.nbytes)}"')
        for cap in self.caps:
            if not cap.fits:
                key = f"{cap.tier.kind.value}.roles.{cap.role.value}"
                lines.append(f'{key} = "{_rounded_up(cap.nbytes)}"')
        return "\n".join(lines)


def plan(
    geometry: Geometry,
    *,
    context: int,
    batch: int,
    budget: MemoryBudget,
    capacities: Mapping[Tier, int] | None = None,
) -> Plan:
    """Compute what one decode step of a model will hold, and what the budget would admit.

    Args:
        geometry: of the model.
        context: tokens of each sequence, from 1 to the model's limit.
        batch: number of sequences, from 1.
        budget: the limits.
        capacities: measured bytes by tier, needed where a budget is a share.

    Raises:
        InvalidInputError: context or batch is out of range.
        BudgetError: a share was asked of a capacity that is not given.
        SizeOverflowError: a size is past 2**63 - 1.
    """
    context = _in_range("context", context, geometry.max_context, f"the limit of {geometry.name}")
    batch = _in_range("batch", batch, MAX_COUNT, "the most that is counted")
    lines = tuple(_lines(geometry, context, batch))
    measured = capacities or {}
    limits = {tier: budget.limit(tier, measured.get(tier)) for tier in (DEVICE, PINNED)}
    totals = _totals(lines)

    def fits_with(context: int, batch: int) -> bool:
        try:
            wanted = tuple(_lines(geometry, context, batch))
            needed = _totals(wanted)
        except SizeOverflowError:
            return False
        return all(_is_within(n, limits[tier]) for tier, n in needed.items()) and all(
            cap.fits for cap in _caps(wanted, budget, limits)
        )

    fits_batch = partial(fits_with, context)
    caps = tuple(_caps(lines, budget, limits))
    # Only the device's share grows with the batch.
    is_limited = limits[DEVICE] is not None or any(cap.tier == DEVICE for cap in caps)
    has_no_limit = not is_limited and fits_batch(1)
    return Plan(
        geometry,
        context,
        batch,
        lines,
        tuple(TierTotal(t, n, limits[t], measured.get(t)) for t, n in totals.items()),
        None if has_no_limit else _largest(fits_batch, MAX_COUNT),
        _largest(lambda tokens: fits_with(tokens, batch), geometry.max_context),
        caps,
    )


def _caps(
    lines: Iterable[PlanLine], budget: MemoryBudget, limits: Mapping[Tier, int | None]
) -> Iterator[RoleCap]:
    needed: dict[tuple[Tier, Role], int] = {}
    for line in lines:
        key = (line.tier, line.role)
        needed[key] = needed.get(key, 0) + line.nbytes
    for (tier, role), nbytes in needed.items():
        limit = budget.tier(tier.kind).cap(tier, "roles", role, limits[tier])
        if limit is not None:
            yield RoleCap(tier, role, nbytes, limit)


def _in_range(subject: str, value: int, most: int, why: str) -> int:
    number = checked_int(subject, value)
    if not 1 <= number <= most:
        accepted = f"an integer from 1 to {most:,}, {why}"
        raise InvalidInputError(subject, found=str(number), accepted=accepted)
    return number


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number from 1 to `most` that fits, 0 where 1 does not.

    What fits must fit with every smaller number too.
    """
    fitting, too_large = 0, most + 1
    while too_large - fitting > 1:
        middle = (fitting + too_large) // 2
        if fits(middle):
            fitting = middle
        else:
            too_large = middle
    return fitting


def _is_within(nbytes: int, limit: int | None) -> bool:
    return limit is None or nbytes <= limit


def _totals(lines: Iterator[PlanLine] | tuple[PlanLine, ...]) -> dict[Tier, int]:
    totals: dict[Tier, int] = {}
    for line in lines:
        totals[line.tier] = totals.get(line.tier, 0) + line.nbytes
    for tier, nbytes in totals.items():
        checked_product(f"total of {tier}", nbytes)
    return totals


def _rounded_up(nbytes: int) -> str:
    unit, size = next((unit, size) for unit, size in _UNITS if nbytes >= size or size == 1)
    return f"{-(-nbytes // size)} {unit}"


def _lines(geometry: Geometry, context: int, batch: int) -> Iterator[PlanLine]:
    if isinstance(geometry, LatentGeometry):
        yield from _latent_lines(geometry, context, batch)
    elif isinstance(geometry, IndexerGeometry):
        yield from _indexer_lines(geometry, context, batch)
    else:
        yield from _state_group_lines(geometry, context, batch)
    yield PlanLine(DEVICE, Role.GRAPH, "captured graph", GRAPH_NBYTES, "one decode step")
    yield PlanLine(PINNED, Role.STAGING, "staging", STAGING_NBYTES, "slots for copies")


def _latent_lines(geometry: LatentGeometry, context: int, batch: int) -> Iterator[PlanLine]:
    latent, indexer = geometry.latent, geometry.indexer
    num_layers, num_indexers = geometry.num_layers, geometry.num_indexers
    cache = checked_product("latent cache", num_layers, batch, context, latent.token_nbytes)
    what = f"{num_layers} layers, {latent.token_nbytes:,} B a token"
    yield PlanLine(DEVICE, Role.KV_CACHE, "latent cache", cache, what)
    keys = checked_product("indexer keys", num_indexers, batch, context, indexer.token_nbytes)
    what = f"{num_indexers} layers, {indexer.token_nbytes:,} B a token"
    yield PlanLine(DEVICE, Role.KV_CACHE, "indexer keys", keys, what)
    shape = Shape(batch, 1, context, indexer.num_heads, indexer.head_dim, indexer.top_k)
    # Each indexer is a kernel, and each kernel owns its workspace.
    yield from _selection_lines(shape, DType.BF16, num_indexers)


def _indexer_lines(geometry: IndexerGeometry, context: int, batch: int) -> Iterator[PlanLine]:
    """Yield every value of one selection by its own name, as a binding holds them."""
    indexer = geometry.indexer
    shape = Shape(batch, 1, context, indexer.num_heads, indexer.head_dim, indexer.top_k)
    dtype = next(dtype for dtype in FLOAT_DTYPES if dtype.label == geometry.dtype)
    specs = input_specs(dtype, B=batch, S=1, T=context, H=shape.H, D=shape.D)
    specs["selected_indices"] = TensorSpec(DType.I64, shape.output)
    for name, spec in specs.items():
        role = Role.KV_CACHE if name == "key" else Role.ACTIVATION
        what = f"{_shape_text(spec)}, one step" if role is Role.ACTIVATION else _shape_text(spec)
        yield PlanLine(DEVICE, role, name, spec.nbytes(name), what)
    yield from _selection_lines(shape, dtype, 1)


def _selection_lines(shape: Shape, dtype: DType, num_kernels: int) -> Iterator[PlanLine]:
    what = f"{num_kernels} kernel{'s' * (num_kernels > 1)}, one step"
    workspace, control = planned_nbytes(shape, dtype)
    for holder, nbytes in (("DsaIndexSelect", workspace), ("DsaIndexSelect control", control)):
        if nbytes:
            total = checked_product("workspaces", num_kernels, nbytes)
            yield PlanLine(DEVICE, Role.WORKSPACE, holder, total, what)


def _shape_text(spec: TensorSpec) -> str:
    return f"{spec.dtype.label} {' × '.join(map(str, spec.sizes))}"


def _state_group_lines(
    geometry: StateGroupGeometry, context: int, batch: int
) -> Iterator[PlanLine]:
    groups = geometry.state_groups
    # A window longer than the sequence would hold nothing more.
    window = min(groups.window, context)
    of_layer = partial(StateGroupLayout.of, batch=batch, max_positions=context, window=window)
    for ratio in (4, 128):
        num_layers = groups.ratios.count(ratio)
        size = of_layer(ratio=ratio).bytes()
        for role, nbytes, what in (
            (Role.STATE_GROUP, size.compressed, "compressed records"),
            (Role.STATE_GROUP, size.index, "index records"),
            (Role.STATE_GROUP, size.carry, "compression carries"),
            (Role.STATE_GROUP, size.index_carry, "index carries"),
            (Role.WORKSPACE, size.scratch, "scratch"),
        ):
            if nbytes and num_layers:
                total = checked_product(what, num_layers, nbytes)
                holder = f"{num_layers} layers of ratio {ratio}"
                yield PlanLine(DEVICE, role, holder, total, what)
    nbytes = of_layer(ratio=0).bytes().dense_ring
    ring = checked_product("dense window", geometry.num_layers, nbytes)
    holder = f"all {geometry.num_layers} layers"
    yield PlanLine(DEVICE, Role.STATE_GROUP, holder, ring, f"dense window, {window} tokens")
