// Elements, units and colours: what every view is made of. Text from the plan goes through here, and
// becomes text nodes only.

// An element with properties and children; children are elements or text.
function make(tag, properties = {}, children = []) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "class") element.className = value;
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key in element) element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

// Puts other children into an element.
function fill(element, children) {
  element.replaceChildren(...children);
}

const byId = (id) => document.getElementById(id);

// A number with so many significant digits, without trailing zeros.
function short(number, digits) {
  return String(Number(number.toPrecision(digits)));
}

// Seconds for people: "18.4 ms".
function formatSeconds(seconds) {
  if (seconds === 0) return "0 s";
  for (const [unit, factor] of [["s", 1], ["ms", 1e-3], ["us", 1e-6]]) {
    if (Math.abs(seconds) >= factor) return `${short(seconds / factor, 3)} ${unit}`;
  }
  return `${short(seconds * 1e9, 3)} ns`;
}

// Bytes for people, in binary units: "3.20 GiB".
function formatBytes(bytes) {
  for (const [unit, factor] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 1024]]) {
    if (Math.abs(bytes) >= factor) return `${(bytes / factor).toFixed(2)} ${unit}`;
  }
  return `${Math.round(bytes)} B`;
}

const formatShare = (share) => `${(100 * share).toFixed(1)}%`;

// "1 host", "2 hosts".
const counted = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

// Stage numbers as "0-3, 7".
function formatStages(stages) {
  const runs = [];
  for (const stage of stages) {
    const last = runs[runs.length - 1];
    if (last && stage === last[1] + 1) last[1] = stage;
    else runs.push([stage, stage]);
  }
  return runs.map(([a, b]) => (a === b ? `${a}` : `${a}-${b}`)).join(", ") || "-";
}

// A colour of the palette; the one of idle things follows light and dark.
function colour(group, name) {
  const value = plan.colours[group][name];
  return value === plan.colours.idle ? "var(--idle)" : value;
}

// The colour of a stage, in turn.
function stageColour(stage) {
  return plan.colours.stages[stage % plan.colours.stages.length];
}

// Red, green and blue of "#rrggbb".
function channels(hex) {
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

// Black or white, whichever can be read on a colour (relative luminance of WCAG 2).
function inkOn(hex) {
  const [r, g, b] = channels(hex).map((c) => {
    const s = c / 255;
    return s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#111111" : "#ffffff";
}

// A box of a colour with a name beside it.
function legendItem(background, name, kind = "") {
  const swatch = make("span", { class: `swatch ${kind}` });
  if (background) swatch.style.background = background;
  return make("span", { class: "legend-item" }, [swatch, name]);
}

// One coloured part of a bar, `share` of its width; hovering says `text`.
function segment(share, background, text, kind = "") {
  const part = make("span", { class: `segment ${kind}`, role: "img" });
  part.style.width = `${100 * share}%`;
  if (background) part.style.background = background;
  return tipped(part, text);
}

// Shows lines of text beside the pointer.
function showTip(event, text) {
  const tip = byId("tip");
  tip.textContent = text;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, window.innerWidth - width - 8);
  const top = event.clientY + 16 + height > window.innerHeight
    ? event.clientY - height - 10 : event.clientY + 16;
  tip.style.left = `${Math.max(left, 4)}px`;
  tip.style.top = `${Math.max(top, 4)}px`;
}

function hideTip() {
  byId("tip").hidden = true;
}

// An element that says a text while the pointer is on it.
function tipped(element, text) {
  element.addEventListener("mousemove", (event) => showTip(event, text));
  element.addEventListener("mouseleave", hideTip);
  element.setAttribute("aria-label", text);
  return element;
}

// Placements of a layout such as "S(0)R~S(0)P" as coloured chips, one an axis: value, then gradient.
function chips(layout) {
  const box = make("span", { class: "chips" });
  layout.split("~").forEach((spec, i) => {
    if (i) box.append("~");
    (spec.match(/[A-Z](\([^)]*\))?/g) || [spec]).forEach((placement, axis) => {
      const chip = make("span", { class: "chip" }, [placement]);
      const background = plan.colours.placement[placement[0]];
      if (background && background !== plan.colours.idle) {
        chip.style.background = background;
        chip.style.color = inkOn(background);
      }
      const [name, size] = plan.axes[axis] || ["axis", "?"];
      chip.title = `${i ? "gradient" : "value"} on ${name} (${size}): ${placement}`;
      box.append(chip);
    });
  });
  return box;
}
