import { render } from "preact";
import { App } from "./app";
import "./styles.css";

const box = document.getElementById("app");
if (box) render(<App />, box);
