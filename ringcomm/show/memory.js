// Bytes of a rank by training system and number of ranks, stacked.
const PARTS = {
  parameters: ["weights", COLORS.blue],
  gradients: ["gradients", COLORS.orange],
  states: ["optimizer states", COLORS.green],
  activations: ["activations", COLORS.yellow],
  buffers: ["temporary", COLORS.pink],
};
const SAID = {
  ddp: "everything on every rank, and buckets: a second copy of the gradients",
  zero1: "optimizer states / N; gradients in float32",
  zero2: "optimizer states and gradients / N; temporary: one bucket of complete gradients",
  zero3: "weights, gradients and optimizer states / N; the gathered weights of one layer are temporary",
  lomo: "no optimizer states; one gradient at a time",
  "lomo-shards": "LOMO with weights / N; the gathered weights of one layer are temporary",
};
const counts = [...new Set(data.rows.map(row => row.ranks))];
const slider = make("input", {
  id: "ranks",
  type: "range",
  min: 0,
  max: counts.length - 1,
  value: Math.min(2, counts.length - 1),
});
const title = make("p", {id: "title", "aria-live": "polite"}),
  picture = make("figure", {id: "picture"}),
  table = make("div", {id: "table"});
const legend = legendOf(Object.values(PARTS));
main.append(
  make("p", {}, `${data.model} has ${three(data.num_params / 1e9)} billion weights. `, data.about),
  make("form", {}, make("label", {}, "ranks", slider)),
  title,
  legend,
  picture,
  table,
  make(
    "p",
    {},
    "These are predictions of zero.predict_memory() and of the planner, for the rank that needs most. Activations do not shrink with N: each rank has its own batch.",
  ),
);

function drawAll() {
  const n = counts[+slider.value],
    rows = data.rows.filter(row => row.ranks === n);
  slider.setAttribute("aria-valuetext", `${n} ranks`);
  title.textContent = `${n} ranks`;
  const total = row => Object.keys(PARTS).reduce((sum, part) => sum + row[part], 0),
    most = Math.max(...data.rows.map(total));
  const left = 100,
    width = 620,
    height = 30;
  const svg = make("svg", {
    viewBox: `0 0 ${left + width + 110} ${rows.length * (height + 8)}`,
    width: left + width + 110,
    role: "img",
    "aria-label": `memory with ${n} ranks`,
  });
  rows.forEach((row, idx) => {
    const y = idx * (height + 8);
    let x = left;
    svg.append(make("text", {x: left - 10, y: y + 20, "text-anchor": "end"}, row.system));
    for (const [part, [name, color]] of Object.entries(PARTS)) {
      const size = (row[part] / most) * width,
        bar = make("rect", {
          x,
          y,
          width: size,
          height,
          fill: color,
          class: "part",
          "data-system": row.system,
          "data-part": part,
          "data-bytes": row[part],
        });
      bar.append(make("title", {}, `${name}: ${bytes(row[part])}`));
      svg.append(bar);
      x += size;
    }
    svg.append(make("text", {x: x + 8, y: y + 20}, bytes(total(row))));
  });
  picture.replaceChildren(svg);
  table.replaceChildren(
    tableOf(
      ["system", ...Object.values(PARTS).map(([name]) => name), "in all", "what a rank has"],
      rows.map(row => [
        row.system,
        ...Object.keys(PARTS).map(part => bytes(row[part])),
        bytes(total(row)),
        SAID[row.system],
      ]),
    ),
  );
}

slider.addEventListener("input", drawAll);
drawAll();
