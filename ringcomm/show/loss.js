// The cross-entropy of one token whose logits are split over ranks by class, beside Megatron's way.
const shown = value => value.toFixed(4);
const ranks = selectOf(
  "ranks",
  range(data.logits.length + 1)
    .filter(n => n && data.logits.length % n === 0)
    .map(n => String(n)),
);
ranks.value = String(data.ranks);
const target = inputOf("number", "target", 0, data.logits.length - 1, data.target);
const own = make("div", {id: "own"}),
  merged = make("p", {id: "merged", "aria-live": "polite"}),
  ways = make("div", {id: "ways"});
main.append(
  paragraph(
    `One token with ${data.logits.length} classes; each rank has the logits of some. The loss is the logarithm of the sum of all exponentials, minus the target's logit. `,
    "No rank has all logits. Three numbers of each rank are enough.",
  ),
  make("form", {}, make("label", {}, "ranks N", ranks), make("label", {}, "target class", target)),
  picture,
  make("h2", {}, "What each rank computes from its own classes"),
  own,
  merged,
  make("h2", {}, "One collective or three"),
  ways,
  paragraph(
    "Megatron's three all_reduces wait for one another: the sum of exponentials needs the maximum of all ranks. Here a rank takes its own maximum m, and sends it beside its sum s: ",
    "s · exp(m − M) corrects the sum when the maximum M of all ranks is known. ",
    "The all_reduce combines them two ranks at a time: two triples are merged into the larger m, both s scaled to it and added, and the target's logit.",
  ),
);

function drawAll() {
  const n = +ranks.value,
    logits = data.logits,
    size = logits.length / n,
    y = whole(target, 0, logits.length - 1);
  const parts = range(n).map(rank => {
    const mine = logits.slice(rank * size, (rank + 1) * size),
      m = Math.max(...mine);
    const s = mine.reduce((sum, logit) => sum + Math.exp(logit - m), 0),
      has = Math.floor(y / size) === rank;
    return {rank, m, s, t: has ? logits[y] : null};
  });
  const M = Math.max(...parts.map(part => part.m)),
    S = parts.reduce((sum, {m, s}) => sum + s * Math.exp(m - M), 0),
    loss = M + Math.log(S) - logits[y];
  const width = 46,
    height = 34,
    gap = 16,
    x = idx => idx * (width + 3) + Math.floor(idx / size) * gap;
  const svg = pictureOf(x(logits.length - 1) + width + 4, height + 26, "logits by rank");
  logits.forEach((logit, idx) => {
    if (idx % size === 0) svg.append(make("text", {x: x(idx), y: 14}, `rank ${idx / size}`));
    svg.append(
      make("rect", {x: x(idx), y: 22, width, height, rx: 3, fill: idx === y ? COLORS.orange : COLORS.blue}),
      label(x(idx) + width / 2, 22 + height / 2 + 5, String(logit), {style: "fill: #fff"}),
    );
  });
  picture.replaceChildren(svg);
  own.replaceChildren(
    tableOf(
      ["rank", "maximum m", "sum s of exp(logit − m)", "target's logit"],
      parts.map(({rank, m, s, t}) => [
        `rank ${rank}`,
        shown(m),
        shown(s),
        t === null ? "not here" : shown(t),
      ]),
    ),
  );
  merged.textContent = `M = ${shown(M)}; the sum of s · exp(m − M) is ${shown(S)}; the loss is M + ln ${shown(S)} − ${shown(logits[y])} = ${shown(loss)}.`;
  merged.dataset.loss = loss;
  ways.replaceChildren(
    tableOf(
      ["way", "collectives in the forward pass", "one after the other"],
      [
        [
          "ringcomm",
          "all_reduce of 24 bytes per token: m, s, the target's logit and what options need (on GPUs an all_gather)",
          "1",
        ],
        ["Megatron-LM", "all_reduce of the maximum, of the target's logit, of the sum", "3"],
      ],
    ),
  );
}

for (const input of [ranks, target]) input.addEventListener("input", drawAll);
drawAll();
