// Memory, model, cluster and alternatives: bars and blocks of plain elements.

const named = (term) => term.replaceAll("_", " ");

// ---- memory ----

// One stage's bar: terms from the left, the reserve at the right end of the device.
function memoryRow(stage, scale) {
  const who = `stage ${stage.index} (ranks ${stage.ranks})`, capacity = plan.capacity_bytes;
  const bar = make("div", { class: "bar" });
  for (const [term, bytes] of Object.entries(stage.memory)) {
    const text = `${who}\n${named(term)}: ${formatBytes(bytes)}, ${formatShare(bytes / capacity)} of the device`;
    if (bytes) bar.append(segment(bytes / scale, colour("memory", term), text));
  }
  const free = capacity - stage.reserve_bytes - stage.total_bytes;
  if (free > 0) bar.append(segment(free / scale, "", `${who}\nfree: ${formatBytes(free)}`, "free"));
  if (stage.reserve_bytes) {
    const text = `${who}\nheld in reserve: ${formatBytes(stage.reserve_bytes)}`;
    bar.append(segment(stage.reserve_bytes / scale, "", text, "reserve"));
  }
  const edge = make("span", { class: "edge" });
  edge.style.left = `${100 * capacity / scale}%`;
  bar.append(edge);
  return make("div", { class: "row memory-row" },
    [stageButton(stage.index), bar, make("span", { class: "figure" }, [formatBytes(stage.total_bytes)])]);
}

// A button that selects a stage, in its colour.
function stageButton(index) {
  const button = make("button", {
    type: "button", class: "stage-button", title: `ranks ${plan.stages[index].ranks}`,
    onclick: () => toggleStage(index),
  }, [`stage ${index}`]);
  button.style.borderLeftColor = stageColour(index);
  button.setAttribute("aria-pressed", String(selection.stage === index));
  return button;
}

// Marks of the bytes axis: quarters of a device.
function memoryAxis(scale) {
  const axis = make("div", { class: "axis" });
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    const mark = make("span", {}, [`${short(share * plan.capacity_bytes / 2 ** 30, 3)}`]);
    mark.style.left = `${100 * share * plan.capacity_bytes / scale}%`;
    axis.append(mark);
  }
  return make("div", { class: "row memory-row" }, [make("span"), axis, make("span", { class: "about" }, ["GiB"])]);
}

function drawMemory() {
  const needs = plan.stages.map((s) => s.total_bytes + s.reserve_bytes);
  const scale = Math.max(plan.capacity_bytes, ...needs);
  const rows = plan.stages.filter((s) => isShown(s.index)).map((s) => memoryRow(s, scale));
  fill(byId("memory-rows"), [memoryAxis(scale), ...rows]);
}

function startMemory() {
  byId("memory-about").textContent = `Bytes on each device of a stage against the ` +
    `${formatBytes(plan.capacity_bytes)} of one ${plan.cluster.device}.`;
  fill(byId("memory-legend"), [
    ...Object.keys(plan.colours.memory).map((t) => legendItem(colour("memory", t), named(t))),
    legendItem("", "free", "free"), legendItem("", "reserve", "reserve"),
  ]);
  watch(drawMemory);
}

// ---- the model ----

// One block of the strip: a button in its stage's colour.
function blockButton(layer, index, matches) {
  const button = make("button", {
    type: "button", role: "option", tabIndex: index === selection.layer ? 0 : -1,
    class: `block ${layer.again ? "again" : ""} ${matches ? "" : "dim"}`,
    onclick: () => chooseLayer(index),
  }, [layer.label.match(/\.(\d+)$/)?.[1] ?? layer.label.split(".").pop()]);
  button.setAttribute("aria-selected", String(index === selection.layer));
  button.dataset.layer = index;
  button.style.backgroundColor = stageColour(layer.stage);
  const text = `${layer.label}\nstage ${layer.stage}, ranks ${plan.stages[layer.stage].ranks}` +
    (layer.again ? "\nforward run again in backward" : "");
  return tipped(button, text);
}

// Selects a block and keeps the keyboard on it.
function chooseLayer(index) {
  select({ layer: index });
  byId("strip").querySelector("[aria-selected=true]")?.focus({ preventScroll: true });
}

// The next shown block in a direction, or the same one at the end.
function nextLayer(by) {
  for (let i = selection.layer + by; i >= 0 && i < LAYERS.length; i += by) {
    if (isShown(LAYERS[i].stage)) return i;
  }
  return selection.layer;
}

function drawStrip() {
  const words = wordsOf(selection.query);
  const matching = LAYERS.map((layer) => layerMatches(layer, words));
  const isGood = (i) => i < LAYERS.length && isShown(LAYERS[i].stage) && matching[i];
  if (!isGood(selection.layer)) {
    const first = LAYERS.findIndex((_, i) => isGood(i));
    if (first >= 0) selection.layer = first;
  }
  const groups = plan.stages.filter((s) => isShown(s.index)).map((stage) => {
    const blocks = LAYERS.flatMap((layer, i) =>
      (layer.stage === stage.index ? [blockButton(layer, i, matching[i])] : []));
    return make("div", { class: "group", role: "group", "aria-label": `stage ${stage.index}` },
      [make("div", { class: "group-name" }, [`stage ${stage.index}`]),
        make("div", { class: "blocks" }, blocks)]);
  });
  fill(byId("strip"), groups);
  const cuts = plan.stages.filter((s) => isShown(s.index) && s.cut);
  byId("cut").textContent = selection.stage !== null && cuts.length
    ? `Stage ${cuts[0].index}: ${cuts[0].cut}.` : "";
  drawBlock();
}

const MOST_PARAMETERS = 200; // drawn of one block

// The parameters of the chosen block that have the searched name, or all, and their placements.
function drawBlock() {
  const layer = LAYERS[selection.layer];
  if (!layer || !isShown(layer.stage)) {
    byId("block-title").textContent = "";
    fill(byId("block"), []);
    return;
  }
  const words = wordsOf(selection.query);
  const found = layer.parameters.filter(({ name }) => holds(name.toLowerCase(), words));
  const listed = found.length ? found : layer.parameters, more = listed.length - MOST_PARAMETERS;
  byId("block-title").textContent = `${layer.label}: stage ${layer.stage}, ` +
    counted(layer.parameters.length, "parameter") +
    (listed.length < layer.parameters.length ? `, ${listed.length} of that name` : "") +
    (more > 0 ? `, ${more} of them not drawn: search by name` : "");
  const head = ["parameter", "shape", "dtype", "stored", "used (value ~ gradient)", "ZeRO"];
  const rows = listed.slice(0, MOST_PARAMETERS).map(({ name, inside, parameter: p }) => make("tr", {}, [
    make("td", { class: "name", title: name }, [inside]), make("td", {}, [p.shape]),
    make("td", {}, [p.dtype]), make("td", {}, [chips(p.stored)]),
    make("td", {}, [chips(p.used)]), make("td", {}, [String(p.zero)]),
  ]));
  fill(byId("block"), !rows.length ? ["This block has no parameters."] : [make("table", {}, [
    make("thead", {}, [make("tr", {}, head.map((text) => make("th", { scope: "col" }, [text])))]),
    make("tbody", {}, rows),
  ])]);
}

function startModel() {
  const axes = plan.axes.map(([name, size]) => `${name}=${size}`).join(", ");
  fill(byId("placement-legend"), [
    ...[["R", "whole"], ["S", "S(d): dim d split"], ["P", "a sum not yet taken"]]
      .map(([letter, text]) => legendItem(colour("placement", letter), text)),
    make("span", { class: "legend-item" }, [`one placement for each mesh axis: ${axes}`]),
  ]);
  byId("strip").addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    chooseLayer(nextLayer(by));
  });
  watch(drawStrip);
}

// ---- the cluster ----

const sumOf = (sums) => Object.values(sums).reduce((a, b) => a + b, 0);

// Bytes by mesh axis as one bar with its sum.
function trafficBar(where, sums, scale) {
  const total = sumOf(sums), bar = make("div", { class: "bar thin" });
  for (const axis of Object.keys(plan.colours.axis)) {
    if (!sums[axis]) continue;
    const text = `${where}\n${axis}: ${formatBytes(sums[axis])} a step`;
    bar.append(segment(sums[axis] / scale, colour("axis", axis), text));
  }
  return make("div", { class: "row traffic-row" },
    [make("span", { class: "about" }, [where]), bar,
      make("span", { class: "figure" }, [total ? formatBytes(total) : "nothing"])]);
}

// One kind of host: its network, its inner links, its devices.
function hostItem(kind, scales) {
  const noun = kind.count === 1 ? "host" : "hosts";
  const title = `${noun} ${kind.hosts}`;
  const { stages } = kind, where = !stages.length ? "idle"
    : `${stages.length === 1 ? "stage" : "stages"} ${formatStages(stages)}`;
  const alike = kind.count === 1 ? where
    : `${where}; ${kind.count} alike: bytes of each, devices of host ${kind.first}`;
  const devices = kind.devices.map((stage) => {
    const idle = stage === null;
    const box = make("span", { class: idle ? "device idle" : "device", role: "img" });
    if (!idle) box.style.background = stageColour(stage);
    return tipped(box, `host ${kind.first}: ${idle ? "an idle device" : `a device of stage ${stage}`}`);
  });
  const { intra } = plan.cluster;
  return make("li", {}, [
    make("div", { class: "host" }, [make("strong", {}, [title]), ` ${alike} `,
      make("span", { class: "about" }, [`ranks ${kind.ranks}`])]),
    trafficBar("leaves the host", kind.outside, scales.outside),
    trafficBar("inside it", kind.inside, scales.inside),
    make("div", { class: "devices", title: intra }, devices),
  ]);
}

function drawCluster() {
  const { cluster } = plan, { kinds } = cluster;
  const scales = {
    outside: Math.max(1, ...kinds.map((k) => sumOf(k.outside))),
    inside: Math.max(1, ...kinds.map((k) => sumOf(k.inside))),
  };
  const shown = kinds.filter((kind) => areShown(kind.stages));
  fill(byId("cluster-tree"), [
    make("div", { class: "host" }, [make("strong", {}, [cluster.name]),
      ` ${counted(cluster.num_hosts, "host")}, ${counted(cluster.num_devices, "device")}`]),
    make("ul", { class: "tree" }, shown.map((kind) => hostItem(kind, scales))),
  ]);
}

function startCluster() {
  const { intra, inter } = plan.cluster;
  byId("cluster-about").textContent = [
    "Bytes of one step, all devices of a host together, by mesh axis; hosts that carry the same are one.",
    intra && `Inside a host: ${intra}.`, inter && `Between hosts: ${inter}.`,
  ].filter(Boolean).join(" ");
  const what = { dp: "dp: data axis", tp: "tp: tensor axis", pp: "pp: stage to stage" };
  fill(byId("cluster-legend"), Object.keys(plan.colours.axis)
    .map((axis) => legendItem(colour("axis", axis), what[axis] ?? axis)));
  watch(drawCluster);
}

// ---- alternatives ----

function alternativeRow(alternative, first, scale) {
  const { name, terms, step_s, peak_bytes, reason } = alternative;
  const bar = make("div", { class: "bar" }), peak = make("div", { class: "bar hair" });
  Object.keys(plan.colours.term).forEach((term, i) => {
    if (!terms[i] || terms[i] < 0) return;
    bar.append(segment(terms[i] / scale, colour("term", term), `${name}\n${term}: ${formatSeconds(terms[i])}`));
  });
  if (peak_bytes !== null) {
    const share = peak_bytes / plan.capacity_bytes;
    const text = `${name}\nfullest device: ${formatBytes(peak_bytes)}, ${formatShare(share)} of its memory`;
    peak.append(segment(Math.min(share, 1), "", text, share > 1 ? "over" : "peak"));
  }
  return make("tr", { class: first ? "chosen" : "" }, [
    make("td", { class: "name" }, [name]),
    make("td", { class: "wide" }, [...(step_s === null ? [] : [bar]), ...(peak_bytes === null ? [] : [peak])]),
    make("td", { class: "number" }, [step_s === null ? "-" : formatSeconds(step_s)]),
    make("td", { class: "number" }, [peak_bytes === null ? "-" : formatBytes(peak_bytes)]),
    make("td", { class: "reason" }, [reason]),
  ]);
}

function startAlternatives() {
  fill(byId("alternatives-legend"), [
    ...Object.keys(plan.colours.term).map((term) => legendItem(colour("term", term), term)),
    legendItem("", "fullest device", "peak"), legendItem("", "more than it has", "over"),
  ]);
  const known = plan.alternatives.map((a) => a.step_s ?? 0);
  const scale = Math.max(...known) || 1;
  const head = ["layout", "parts of the step", "step", "peak", "why not"];
  fill(byId("alternatives-rows"), [make("table", {}, [
    make("thead", {}, [make("tr", {}, head.map((text) => make("th", { scope: "col" }, [text])))]),
    make("tbody", {}, plan.alternatives.map((a, i) => alternativeRow(a, i === 0, scale))),
  ])]);
}
