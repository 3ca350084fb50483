// Memory over one backward pass, weight by weight from the last one to the first.
// Weights and states are multiples of the bfloat16 weights, of which a float32 copy has twice the bytes.
const SYSTEMS = {
  AdamW: {
    weights: 3,
    states: 4,
    keepsGradients: true,
    said: "two float32 states for each weight; all gradients until step()",
  },
  SGD: {weights: 3, states: 0, keepsGradients: true, said: "no states; all gradients until step()"},
  LOMO: {
    weights: 1,
    states: 0,
    keepsGradients: false,
    said: "one gradient at a time: it is applied to its weight and freed",
  },
};
const PARTS = {
  weights: COLORS.blue,
  states: COLORS.green,
  activations: COLORS.yellow,
  gradients: COLORS.orange,
};
const sizes = data.sizes,
  total = sizes.reduce((sum, {bytes}) => sum + bytes, 0);

// Bytes after `count` weights have got their gradients; activations of a unit go with its last weight.
function memoryAt(name, count) {
  const {weights, states, keepsGradients} = SYSTEMS[name],
    done = sizes.slice(0, count);
  const all = done.reduce((sum, {bytes}) => sum + bytes, 0);
  return {
    weights: weights * total,
    states: states * total,
    activations: sizes.slice(count).reduce((sum, {activations}) => sum + activations, 0),
    gradients: keepsGradients ? all : done.length ? done.at(-1).bytes : 0,
  };
}

const sum = parts => Object.values(parts).reduce((all, part) => all + part, 0);
const peak = name => Math.max(...range(sizes.length + 1).map(count => sum(memoryAt(name, count))));
const most = Math.max(...Object.keys(SYSTEMS).map(peak));
const slider = inputOf("range", "step", 0, sizes.length, Math.round(sizes.length / 2));
const table = make("div", {id: "table"});
main.append(
  paragraph(`${data.model}: ${sizes.length} weight tensors, ${bytes(total)}. `, data.about),
  make("form", {}, make("label", {}, "gradients computed", slider), playerOf(slider, drawAll).play),
  title,
  legendOf(Object.entries(PARTS)),
  picture,
  table,
  make("h2", {}, "What an optimizer keeps"),
  tableOf(
    ["optimizer", "in memory"],
    Object.entries(SYSTEMS).map(([name, {said}]) => [name, said]),
  ),
  paragraph(
    "LOMO never stores the gradients of the model together: the backward pass computes one, applies it to its weight and frees it before the next. ",
    "AdaLomo also keeps one row and one column of numbers for each matrix.",
  ),
);

function drawAll() {
  const count = +slider.value,
    left = 60,
    width = isNarrow() ? 90 : 280,
    height = 180,
    gap = isNarrow() ? 10 : 24,
    top = 40,
    y = value => top + height - (value / most) * height;
  slider.setAttribute("aria-valuetext", `${count} of ${sizes.length}`);
  title.textContent = count
    ? `${count} of ${sizes.length} gradients; the last was that of ${sizes[count - 1].name}`
    : "Before the backward pass";
  const svg = pictureOf(left + 3 * (width + gap), height + top + 20, "memory over a backward pass");
  const unit = 2 ** Math.floor(Math.log2(most / 3));
  for (const value of range(Math.floor(most / unit) + 1).map(idx => idx * unit))
    svg.append(
      make("line", {
        x1: left,
        x2: left + 3 * (width + gap) - gap,
        y1: y(value),
        y2: y(value),
        stroke: "var(--line)",
      }),
      label(left - 8, y(value) + 4, bytes(value), {"text-anchor": "end"}),
    );
  const num = Math.min(sizes.length, 150),
    at = range(num + 1).map(i => Math.round((i / num) * sizes.length));
  Object.keys(SYSTEMS).forEach((name, idx) => {
    const begin = left + idx * (width + gap),
      x = i => begin + (i / num) * width;
    let lower = at.map(() => 0);
    svg.append(
      make("text", {x: begin, y: 12}, name),
      label(begin + width / 2, height + top + 16, isNarrow() ? "gradients →" : "gradients computed →", {
        class: "faint",
      }),
    );
    for (const [part, color] of Object.entries(PARTS)) {
      const upper = at.map((position, i) => lower[i] + memoryAt(name, position)[part]);
      const line = values => values.map(([i, value]) => `${x(i)} ${y(value)}`).join(" L");
      svg.append(
        make("path", {
          d: `M${line([...upper.entries()])} L${line([...lower.entries()].reverse())} Z`,
          fill: color,
        }),
      );
      lower = upper;
    }
    const now = begin + (count / sizes.length) * width;
    svg.append(
      make("line", {x1: now, x2: now, y1: top, y2: top + height, stroke: "var(--ink)", "stroke-width": 2}),
    );
    // One gradient of LOMO has less than a pixel: the number says it, and the mark where it is.
    const parts = memoryAt(name, count);
    svg.append(
      make(
        "text",
        {x: begin, y: 30, class: "gradients"},
        isNarrow() ? bytes(parts.gradients) : `gradients now: ${bytes(parts.gradients)}`,
      ),
      make("rect", {
        x: now - 4,
        y: y(sum(parts)) - 3,
        width: 8,
        height: parts.gradients ? 3 + (parts.gradients / most) * height : 0,
        fill: COLORS.orange,
        stroke: "var(--ink)",
        class: "mark",
      }),
    );
  });
  picture.replaceChildren(svg);
  table.replaceChildren(
    tableOf(
      ["optimizer", "now", "most", ...Object.keys(PARTS)],
      Object.keys(SYSTEMS).map(name => {
        const parts = memoryAt(name, count);
        return [name, bytes(sum(parts)), bytes(peak(name)), ...Object.values(parts).map(part => bytes(part))];
      }),
    ),
  );
}

drawAll();
