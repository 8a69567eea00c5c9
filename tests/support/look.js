// Each page in a frame of its own; when all are there, what is wrong with each. FRAMES: [name, width, colours, page].
const near = 1  // CSS pixels
const frames = FRAMES.map(([name, width, colours, page]) => {
  const frame = document.createElement("iframe")
  frame.style = `display: block; border: 0; width: ${width}px; height: 1400px; color-scheme: ${colours}`
  frame.srcdoc = page
  document.body.append(frame)
  return {frame, colours}
})

const clipped = (box, room) => box.left < room.left - near || box.right > room.right + near
  || box.top < room.top - near || box.bottom > room.bottom + near

const channels = colour => (colour.match(/[\d.]+/g) || []).map(Number)

// Relative luminance and contrast, as WCAG 2 defines them.
const luminance = ([red, green, blue]) => [red, green, blue].map(each => each / 255)
  .map(each => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
  .reduce((sum, each, at) => sum + each * [0.2126, 0.7152, 0.0722][at], 0)
const contrast = (one, other) => {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b)
  return (high + 0.05) / (low + 0.05)
}

// The colour behind the middle of a text: of what was painted before it, the last that covers the place.
const behind = (text, box, win) => {
  const x = (box.left + box.right) / 2, y = (box.top + box.bottom) / 2
  let colour = channels(win.getComputedStyle(win.document.body).backgroundColor)
  for (const each of text.ownerSVGElement.querySelectorAll("rect, circle, text")) {
    if (each === text) break
    if (each.tagName === "text") continue
    const at = each.getBoundingClientRect()
    if (at.left > x || at.right < x || at.top > y || at.bottom < y) continue
    const style = win.getComputedStyle(each)
    const painted = style.fill === "none" ? [] : channels(style.fill)
    const part = (painted.length > 3 ? painted[3] : 1) * style.fillOpacity * style.opacity
    if (painted.length) colour = colour.slice(0, 3).map((old, i) => old * (1 - part) + painted[i] * part)
  }
  return colour
}

const pictures = win => {
  const out = []
  for (const svg of win.document.querySelectorAll("svg")) {
    const room = svg.getBoundingClientRect()
    for (const text of svg.querySelectorAll("text")) {
      const box = text.getBoundingClientRect()
      if (!box.width) continue
      if (clipped(box, room)) out.push("text: " + text.textContent)
      if (contrast(channels(win.getComputedStyle(text).fill), behind(text, box, win)) < 3) {
        out.push("faint: " + text.textContent)
      }
    }
  }
  return out
}

const boxes = win => {
  const out = []
  for (const each of win.document.querySelectorAll("body, body *:not(svg):not(svg *)")) {
    const style = win.getComputedStyle(each), scrolls = ["auto", "scroll"].includes(style.overflowX)
    if (each.scrollWidth > each.clientWidth + near && each.clientWidth && !scrolls && style.display !== "inline") {
      out.push("text: " + each.tagName.toLowerCase() + " " + each.textContent.slice(0, 60))
    }
  }
  if (win.document.documentElement.scrollWidth > win.innerWidth + near) out.push("page: wider than its window")
  return out
}

addEventListener("load", () => {
  const found = document.createElement("pre")
  found.id = "found"
  found.textContent = JSON.stringify(frames.map(({frame, colours}) => {
    const win = frame.contentWindow, dark = win.matchMedia("(prefers-color-scheme: dark)").matches
    return [...pictures(win), ...boxes(win), ...(dark === (colours === "dark") ? [] : ["page: in other colours"])]
  }))
  document.body.append(found)
})
